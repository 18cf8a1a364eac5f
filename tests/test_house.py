"""The rules of the house: who may import whom, how long lines, functions and classes may be, and what the coordinator
loads."""

import ast
import functools

import pytest

from recordings import HERE, python

# from the bottom up: a root file, or any file of a folder -> what it may import besides its own folder
MODEL = {"egg_config"}
KERNELS = CLUSTER = MODEL | {"model"}
EGG_KERNELS, EGG_NET = KERNELS | {"kernels"}, CLUSTER | {"cluster"}
ENGINE, ISLANDS = EGG_KERNELS | {"egg_kernels"}, EGG_NET | {"egg_net"}
TOOLS = ENGINE | ISLANDS | {"engine", "islands"}
DEPLOY = TOOLS | {"tools"}
MAY_IMPORT = dict(egg_config=set(), model=MODEL, kernels=KERNELS, cluster=CLUSTER, egg_kernels=EGG_KERNELS,
                  egg_net=EGG_NET, engine=ENGINE, islands=ISLANDS, tools=TOOLS, deploy=DEPLOY, egg=DEPLOY | {"deploy"},
                  egg_use=DEPLOY | {"egg"}, lab=DEPLOY)
FOLDERS = ["model", "kernels", "engine", "cluster", "islands", "tools", "deploy", "lab"]

COLUMNS, CLASS_LINES, FUNCTION_LINES = 120, 300, 120

PRODUCT = [path for folder in ["", *FOLDERS] for path in sorted((HERE / folder).glob("*.py"))
           if path.name != "test_egg.py"]
TESTS = [HERE / "test_egg.py", *sorted((HERE / "tests").glob("*.py"))]


def name_of(path):
    return path.relative_to(HERE).as_posix()


def module_of(path):
    return name_of(path).removesuffix(".py").removesuffix("/__init__").replace("/", ".")


MODULES = {module_of(path): path for path in PRODUCT}


@functools.cache
def parse(path):
    return ast.parse(path.read_text(), name_of(path))


def imports_of(path):
    """[(line, module)]: every module of the program that a file imports anywhere in it, also within functions."""
    found = []
    for node in ast.walk(parse(path)):
        if isinstance(node, ast.Import):
            names = [alias.name for alias in node.names]
        elif isinstance(node, ast.ImportFrom):
            package = module_of(path).split(".")[:-node.level] if node.level else []
            base = ".".join([*package, *([node.module] if node.module else [])])
            # `from folder import module` names a module, `from module import name` does not
            names = [name if (name := f"{base}.{alias.name}") in MODULES else base for alias in node.names]
        else:
            continue
        found += [(node.lineno, name) for name in names if name.split(".")[0] in MAY_IMPORT]
    return found


def none_of(violations):
    assert not violations, f"{len(violations)} of them:\n" + "\n".join(violations)


def test_the_root_holds_the_files_that_tell_the_story():
    known = {"egg.py", "egg_config.py", "egg_kernels.py", "egg_net.py", "egg_use.py", "test_egg.py"}
    none_of([path.name for path in sorted(HERE.glob("*.py")) if path.name not in known])


def test_imports_point_down():
    violations = []
    for module, path in MODULES.items():
        own = module.split(".")[0]
        allowed = MAY_IMPORT[own] | ({own} if "." in module else set())
        violations += sorted({f"{name_of(path)}:{line} imports {name}" for line, name in imports_of(path)
                              if name.split(".")[0] not in allowed})
    none_of(violations)


def test_imports_have_no_cycle():
    graph = {module: sorted({name for _, name in imports_of(path)}) for module, path in MODULES.items()}
    cycles, done = set(), set()

    def visit(module, trail):
        if module in trail:
            loop = trail[trail.index(module):]
            first = loop.index(min(loop))
            cycles.add(" -> ".join([*loop[first:], *loop[:first], min(loop)]))
        elif module not in done:
            for name in graph.get(module, ()):
                visit(name, [*trail, module])
            done.add(module)

    for module in graph:
        visit(module, [])
    none_of(sorted(cycles))


@pytest.mark.parametrize("paths", [PRODUCT, TESTS], ids=["product", "tests"])
def test_lines_end_at_120_columns(paths):
    if paths is PRODUCT:
        paths = [*paths, HERE / "Makefile", *sorted(HERE.glob("*.sh")), *sorted(HERE.glob("lab/*.sh")),
                 *sorted(HERE.glob("requirements/*"))]
    long = {name_of(path): [i for i, line in enumerate(path.read_text().split("\n"), 1) if len(line) > COLUMNS]
            for path in paths}
    none_of([f"{name}: lines {', '.join(map(str, lines))}" for name, lines in long.items() if lines])


def sizes(path, kinds):
    """[(line, name, lines)] of the functions or classes of a file, inner ones included."""
    return [(node.lineno, node.name, node.end_lineno - node.lineno + 1) for node in ast.walk(parse(path))
            if isinstance(node, kinds)]


@pytest.mark.parametrize("kinds, most", [((ast.ClassDef,), CLASS_LINES),
                                         ((ast.FunctionDef, ast.AsyncFunctionDef), FUNCTION_LINES)])
def test_no_class_and_no_function_is_too_long(kinds, most):
    none_of([f"{name_of(path)}:{line} {name} has {lines} lines" for path in [*PRODUCT, *TESTS]
             for line, name, lines in sizes(path, kinds) if lines > most])


# --- what the coordinator loads --------------------------------------------------------------------------------------

COORDINATOR = """
import os, sys, egg_config, egg_net
from cluster import event_log, history
cfg, console = egg_config.make(), egg_net.Console()
run = history.open_run(cfg, sys.argv[1])
events, http = event_log.Events(cfg, run, console), None
if sys.argv[2] == "page":
    from cluster import auth; from tools import live_page
    http = live_page.where(("127.0.0.1", 0), auth.Access())
coordinator = egg_net.Coordinator(cfg, run, "127.0.0.1", 0, console=console, events=events, http=http)
coordinator.poll(0)
print(f"step {run.step},")
print(*sorted({name.split(".")[0] for name in sys.modules}))
run.append(bytes(-(-cfg.N_PAIRS // 5)), 0, 0)
"""


@pytest.mark.parametrize("steps, page", [(0, ""), (2, ""), (0, "page")])
def test_the_coordinator_loads_neither_engine_nor_libraries(tmp_path, steps, page):
    """Also where it goes on with a saved run, or has a page."""
    for _ in range(steps + 1):
        said = python("-c", COORDINATOR, tmp_path, page)
    assert f"step {steps}," in said
    unwanted = {"numpy", "pyzstd", "numba", "llvmlite", "numba_cuda", "tokenizers", "matplotlib", "tensorboardX",
                "wandb", "mlflow", "multiprocessing", "egg", "egg_kernels", "engine", "kernels", "islands"}
    assert not (unwanted if page else unwanted | {"http", "tools"}) & set(said.split())
