"""Compiling: CUDA kernels without a GPU, and the CPU engine."""

from unittest import mock

import egg_config

# compute capability -> KiB of shared memory that a block can have
CARDS = {(8, 0): 163, (8, 6): 99, (8, 9): 99, (9, 0): 227, (10, 0): 227, (12, 0): 99}


def kernels_for(cfg, cc=(9, 0)):
    """engine.cuda_engine.kernels for a configuration on a card: (forward, its own kernels, {verb: [Kernel]})."""
    from engine import cuda_engine
    return cuda_engine.kernels(cfg, cc, CARDS[cc] * 1024)


def kernels_of(cfg, cc, verbs=("load", "step", "validate", "write", "digest")):
    """[Kernel], each once, of verbs of a configuration on a card."""
    by_verb = kernels_for(cfg, cc)[2]
    return list({id(kernel.dispatcher): kernel for verb in verbs for kernel in by_verb[verb]}.values())


def ptx_of(kernel, cc):
    """The PTX of a Kernel for a card."""
    from numba import cuda
    from numba.cuda import dispatcher
    from numba.cuda.core import ir
    from numba.cuda.cudadrv import devices

    from engine import cuda_engine
    with (mock.patch.object(devices, "_runtime"), mock.patch.object(dispatcher._Kernel, "bind"),
          mock.patch.object(ir.Loc, "__deepcopy__", lambda place, _: place, create=True)):      # saves a quarter
        cuda_engine.without_gpu(cc)
        return cuda.compile_ptx(kernel.dispatcher.py_func, kernel.signature, cc=(9, 0, "a") if cc == (9, 0) else cc)[0]


def compile_cpu_engine(model, ready):
    """Compiles all of the CPU engine for a model, and says so by a file in the directory `ready`."""
    from engine import cpu_engine
    try:
        cpu_engine.warm_up(egg_config.make(MODEL=model, USE_MUON=1), lambda line: None, cpu_engine.VERBS)
    finally:
        (ready / model).touch()
