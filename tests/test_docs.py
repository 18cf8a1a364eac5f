"""The documents against the program: constants, presets, references to sections, links, commands, frames, events."""

import ast
import re
import shlex

import numpy as np
import pytest

import egg
import egg_config
from cluster import admission, auth, dispatch, event_log, hub, link, status, wire
from commands import run
from recordings import HERE, python
from model import steps
from tools import live_page
from tools.curves import read_curve
from readings import configured

README, DOCS = HERE / "README.md", sorted([*HERE.glob("docs/*.md"), *HERE.glob("lab/*.md")])
SOURCES = sorted([*HERE.glob("*.py"), *HERE.glob("[!.]*/*.py")])      # not of folders that other tests may just remove
PAGE_BYTES, COLUMNS = 9_216, 160
MENTIONED = ("make run", "make test", "egg.py coordinator", "egg.py worker", "egg.py arch", "run-workers.sh",
             "egg_config.py")


def rows(text):
    """[[cell]] of every table row of a Markdown text."""
    return [[cell.strip() for cell in line.strip("|").split("|")] for line in text.split("\n") if line.startswith("| ")]


def anchor(heading):
    """The link target of a heading, as GitHub makes it."""
    return re.sub(r"[^\w\- ]", "", re.sub(r"[`*]", "", heading).lower()).replace(" ", "-")


def document(name):
    """The text of docs/<name>.md."""
    return (HERE / "docs" / f"{name}.md").read_text()


def headings(path):
    return {anchor(match[1]) for match in re.finditer(r"^#+ (.*)$", path.read_text(), re.MULTILINE)}


def test_the_readme_is_short_and_shows_the_way():
    text = README.read_text()
    assert len(text.encode()) <= PAGE_BYTES and (HERE / "docs" / "BENCHMARKS.md").stat().st_size <= PAGE_BYTES
    assert not [words for words in MENTIONED if words not in text]


def test_limits_are_those_of_the_program():
    security, protocol = document("SECURITY"), document("PROTOCOL")
    for text, words in (
            (security, f"{hub.Connection.PIECE >> 10} KiB of a peer"), (security, f"{admission.ARRIVALS} strangers"),
            (security, f"A stranger has {auth.HANDSHAKE_SECONDS:g} s"),
            (security, f"first {dispatch.PROBATION} chunks"),
            (security, f"limited to {event_log.OF_PEERS[0]:g} a second"), (protocol, f"first\n{status.WORKERS:,}:"),
            (protocol, f"more than {admission.FRAME_SECONDS:g} s to complete a frame"),
            (protocol, "for 60 s takes nothing"),
            (protocol, f"the last {status.BANS}:"), (protocol, f"HEARTBEAT every {link.HEARTBEAT_EVERY:g} s"),
            (protocol, f"IDLE_TIMEOUT ({egg_config.IDLE_TIMEOUT:g} s)"),
            (protocol, f"at most {wire.REWARD.most >> 10} KiB"), (protocol, f"at most {wire.STATUS.most >> 20} MiB")):
        assert words in text, words


def numbers(text):
    """[(number, decimals)] of every number of at least two digits in a text."""
    found = [match.replace(",", "") for match in re.findall(r"\d[\d,]*\.?\d+", text)]
    return [(float(number), len(number.partition(".")[2])) for number in found]


def test_the_readme_repeats_figures_of_the_benchmarks():
    """Every figure in the README's table is a figure of BENCHMARKS, or rounds one."""
    section = README.read_text().partition("\n## Figures\n")[2].partition("\n## ")[0]
    repeated = numbers(" ".join(cell for row in rows(section) for cell in row[1:]))
    measured = [number for number, _ in numbers(document("BENCHMARKS"))]
    assert len(repeated) > 20
    assert not [number for number, decimals in repeated
                if all(abs(number - one) > 0.501 * 10 ** -decimals for one in measured)]


def test_the_picture_of_learning_shows_figures_of_the_readme():
    """The validation of a curve that is nearest to a time in the README's table."""
    curves = {(name, card): file for file, name, card in re.findall(
        r"^(\S+) egg: ([\w-]+), (H200|2 threads)$", (HERE / "lab" / "learning.sh").read_text(), re.M)}
    table = re.findall(r"^\| `([\w-]+)`, (?:one )?(H200|2 threads)[^,]*, after (.*?) \| (.*?) \|",
                       README.read_text(), re.M)
    assert table
    for name, card, times, figures in table:
        shown = read_curve(HERE / "docs" / "learning" / f"{curves[name, card]}.jsonl").validation
        for at, figure in zip(re.findall(r"\d+", times), figures.split(" / "), strict=True):
            near = min(shown, key=lambda point: abs(point.seconds - int(at)))
            low, high = (float(figure.split(" to ")[i]) for i in (0, -1))
            assert abs(near.seconds - int(at)) < 0.1 * int(at) and low - 0.01 < near.value < high + 0.01, (name, at)


every_document = pytest.mark.parametrize("path", [README, *DOCS], ids=lambda path: path.name)


@every_document
def test_lines_fit_and_links_lead_somewhere(path):
    text = path.read_text()
    assert not [line for line in text.split("\n") if len(line) > COLUMNS]
    for target in re.findall(r"\]\(([^)\s]+)\)", text):
        if "://" in target:
            continue
        name, _, section = target.partition("#")
        file = path.parent / name if name else path
        assert file.exists(), target
        assert not section or section in headings(file), target


@every_document
def test_files_of_the_program_exist(path):
    folders = "|".join(sorted({file.parent.name for file in SOURCES} - {HERE.name}))
    named = re.findall(rf"\b(?:requirements|{folders})/[\w/]+\.(?:py|sh|txt)\b", path.read_text())
    assert not [name for name in named if not (HERE / name).exists()]
    assert {*re.findall(r"pip install (\S+)", path.read_text())} <= {"-r", "torch`)"}


def test_the_tables_of_constants_are_those_of_the_program():
    printed = python(HERE / "egg_config.py")
    written = document("CONFIGURATION")
    assert printed in written, "python egg_config.py prints what stands there"
    assert {row[0] for row in rows(printed)} == {"constant", *egg_config.CONSTANTS}
    assert printed == egg_config.tables() + "\n"
    assert {row[0] for row in rows(written)} >= {*egg_config.PRESETS}


def test_references_to_the_contract_lead_to_a_section():
    sections = {int(match[1]) for match in re.finditer(r"^## (\d+)\. ", document("SPEC"), re.M)}
    assert sections == set(range(1, 24))
    for path in [*SOURCES, README, *DOCS]:
        for match in re.finditer(r"\bSPEC(?: sections?)? (\d+(?:(?:, | to | and )\d+)*)", path.read_text()):
            assert set(map(int, re.findall(r"\d+", match[1]))) <= sections, f"{path.name}: {match[0]}"


def commands(path):
    """[[argument]]: the command lines of egg.py in the indented lines of a document."""
    found = []
    for line in path.read_text().split("\n"):
        match = re.match(r"    (?:\$ )?(?:\S*python|\.venv/bin/python) egg\.py (.*)", line)
        if match and "$" not in match[1] and "..." not in match[1]:
            found.append(shlex.split(re.split(" [|>] ", match[1])[0].rstrip(" &"), comments=True))
    return found


@every_document
def test_commands_are_understood(path):
    for arguments in commands(path):
        args = egg.parsed(arguments)
        configured(args.preset, *args.defines)
    assert path is not README or len(commands(path)) > 8


def test_every_island_of_the_document_has_its_workers():
    text = document("ISLANDS")
    islands = re.findall(r"egg\.py coordinator --preset (\w+) --island \w+ \$peers (-D ISLAND_SEED=\d) ", text)
    workers = re.findall(r"\./run-workers\.sh [\d.]+ --preset (\w+) (-D ISLAND_SEED=\d) ", text)
    assert len(islands) == 2 and islands == workers


def test_examples_of_the_help_are_understood():
    """On a machine of any size; those of a cluster have a preset, without which it learns slowly."""
    names = re.findall(r"^    (\w+)(?=  |$)", run("--help").stdout, re.M)
    texts = [run(*name, "--help").stdout for name in ([], *([name] for name in names))]
    examples = re.findall("python egg.py (?!COMMAND)(.*?)(?:`|  |$)", "\n".join(texts), re.M)
    assert len(names) == 16 and len(examples) > 30
    for example in examples:
        args = egg.parsed(shlex.split(example.partition(" > ")[0]))
        configured(args.preset, *args.defines)
        assert args.preset or not example.startswith(("coordinator", "worker")), example


def test_the_frame_in_hex_is_a_frame():
    text = document("PROTOCOL")
    block = text[text.index("    4a4f4253"):].partition("\n\n")[0]
    written = "".join(re.match(r" +((?:[0-9a-f]+ )*[0-9a-f]+)(?: {2}|$)", line)[1] for line in block.split("\n"))
    fitness = steps.pack_digits(np.array([1, -1, 0, 0, 1], np.int8))
    assert written.replace(" ", "") == wire.frame(wire.RESULT, 42, 0, 10, 0, 12345, len(fitness), fitness,
                                                  version=wire.V2).hex()


def test_every_frame_is_in_the_protocol():
    table = {row[1]: row[0] for row in rows(document("PROTOCOL")) if row[0].isdigit()}
    opcodes = {name: getattr(wire, name) for limits in wire.limits(egg_config.make()).values()
               for name in map(wire.NAMES.get, limits)}
    assert {name: int(table.get(name, -1)) for name in opcodes} == opcodes


def test_every_event_and_metric_is_described():
    text = document("EVENTS")
    described = {name for row in rows(text) for name in row[0].split(", ")}
    trees = [ast.parse(path.read_text()) for path in SOURCES if HERE / "tests" not in path.parents]
    calls = [node for tree in trees for node in ast.walk(tree)
             if isinstance(node, ast.Call) and getattr(node.func, "attr", "") == "emit" and node.args]
    kinds = {node.args[0].value for node in calls if isinstance(node.args[0], ast.Constant)} - {None}
    assert len(kinds) > 10 and kinds - described == set()
    metrics = {line.split()[0] for line in live_page.METRICS.splitlines()}
    assert metrics and {name for name in metrics if not re.search(rf"\b{name}\b", text)} == set()
