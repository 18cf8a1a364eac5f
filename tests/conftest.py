"""Fixtures that several test files use."""

import concurrent.futures
import multiprocessing
import os
import subprocess

import pytest

import egg_config
import kit
from engine import hardware
from kit import CFG


@pytest.fixture(scope="module")
def compiled():
    """The CPU engine's kernels are in the cache, so that worker processes need not all compile them."""
    from engine import cpu_engine
    cpu_engine.warm_up(CFG, lambda line: None, cpu_engine.VERBS)


@pytest.fixture
def small(tmp_path, monkeypatch):
    """A configuration that trains in a moment, in a directory with its data."""
    text = (b"the quick brown fox jumps over the lazy dog. " * 200)
    (tmp_path / "input.bin").write_bytes(text)
    (tmp_path / "val.bin").write_bytes(text[:500])
    monkeypatch.chdir(tmp_path)
    return egg_config.make(**{**CFG.constants(), "DEVICE": "cpu", "VALIDATE_TOKENS": 64})


@pytest.fixture(scope="module")
def certificates(tmp_path_factory):
    """(certificate, key) files of localhost, signed by itself."""
    at = tmp_path_factory.mktemp("tls")
    subprocess.run(["openssl", "req", "-x509", "-newkey", "ec", "-pkeyopt", "ec_paramgen_curve:prime256v1", "-nodes",
                    "-days", "2", "-subj", "/CN=localhost", "-addext", "subjectAltName=DNS:localhost,IP:127.0.0.1",
                    "-keyout", at / "key", "-out", at / "cert"], check=True, capture_output=True)
    return at / "cert", at / "key"


@pytest.fixture(scope="session")
def compiler():
    """A kit.Compiler on as many processes as this one has cores for itself."""
    cores = 1 if "PYTEST_XDIST_WORKER" in os.environ else hardware.cores()
    with concurrent.futures.ProcessPoolExecutor(cores, multiprocessing.get_context("spawn")) as pool:
        yield kit.Compiler(pool)
        pool.shutdown(cancel_futures=True)
