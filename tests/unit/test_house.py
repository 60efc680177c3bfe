"""The house rules: imports run one way and in no circle, files and functions stay small, no shell and no pickle."""

from __future__ import annotations

import ast
import graphlib
import re
import subprocess
import sys
from functools import cache
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
SOURCES = sorted(path for top in ("app", "trainers", "ui") for path in (ROOT / top).rglob("*.py"))
SHARED = ("trainers.config", "trainers.strategy", "trainers.run")
"""The rooms of `trainers/` that `app/` and `ui/` import, beside the paths of the embedded model; without torch."""
EMBEDDED = {"trainers.embedded", *(f"trainers.embedded.{name}" for name in ("BASE_DIR", "DATA_DIR", "GENERAL_DIR"))}
FLOORS = (
    *("trainers.embedded", *SHARED, "trainers.data", "trainers.objectives", "trainers.model", "trainers.parallel"),
    *("trainers.checkpoint", "trainers.monitor", "trainers.rewards", "trainers.tools", "trainers.evaluation"),
    *("trainers.sampling_server", "trainers.served"),
    *("trainers.teacher", "trainers.principal", "trainers.build"),
    *("trainers.generation", "trainers.answers", "trainers.rollouts", "trainers.step", "trainers.row_evaluation"),
    *("trainers.loop", "trainers.reference", "trainers.train"),
    *("app.console", "app.typer_style", "app.reference", "app.hardware", "app.command_line", "app.accelerate_launch"),
    *("app.schedulers", "app.runs", "app.diagnosis", "app.launch", "app.plan", "app.prove", "app.bench", "app.doctor"),
    *(
        "app.sweep",
        "app.services",
        "app.eval",
        "app.push",
        "app.merge",
        "app.commands",
        "app.cli_errors",
        "app.cli_runs",
        "app.cli_sweep",
        "app.cli_export",
        "app.cli",
        "ui",
    ),
)
"""Every room, from the ground up: each imports only from those before it."""


def imports_of(path: Path) -> set[str]:
    """Modules that a file imports, anywhere in it."""
    return _imports_in(path.read_text(encoding="utf-8"))


@cache
def _imports_in(source: str) -> set[str]:
    found: set[str] = set()
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.Import):
            found |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom) and node.module:
            found |= {node.module} | {f"{node.module}.{alias.name}" for alias in node.names}
    return found


def forbidden(path: Path) -> set[str]:
    """Imports that go the wrong way."""
    top, found = path.relative_to(ROOT).parts[0], imports_of(path)
    tops = {name.partition(".")[0] for name in found}
    if top == "trainers":
        return tops & {"app", "ui"}
    wrong = tops & ({"torch", "transformers", "accelerate", "peft", "datasets"} | ({"ui"} if top == "app" else set()))
    inner = {name for name in found if name.startswith("trainers.")} - EMBEDDED
    return wrong | {name for name in inner if room_of(name) not in SHARED}


@pytest.mark.parametrize("path", SOURCES, ids=lambda path: str(path.relative_to(ROOT)))
def test_imports_run_one_way(path: Path) -> None:
    assert not forbidden(path)


def test_a_wrong_import_would_be_seen(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys.modules[__name__], "ROOT", tmp_path)
    (tmp_path / "app").mkdir()
    (tmp_path / "app" / "x.py").write_text(
        "def f():\n    import torch\n    from trainers.model.load import build_model\n"
    )
    assert forbidden(tmp_path / "app" / "x.py") == {"torch", "trainers.model.load", "trainers.model.load.build_model"}


def import_graph(sources: list[Path], root: Path) -> dict[str, set[str]]:
    """Of each module those of the house that it imports anywhere: at the top, in a function, for type checks."""
    modules = {
        ".".join(path.relative_to(root).with_suffix("").parts).removesuffix(".__init__"): path for path in sources
    }
    return {module: (imports_of(path) & modules.keys()) - {module} for module, path in modules.items()}


def circle_in(graph: dict[str, set[str]]) -> list[str]:
    """Modules that import each other, in order; empty without any."""
    try:
        graphlib.TopologicalSorter(graph).prepare()
    except graphlib.CycleError as error:
        return list(error.args[1])
    return []


def room_of(module: str) -> str:
    """`trainers.data` of `trainers.data.batches`; all pages are one room."""
    return "ui" if module.startswith("ui.") else ".".join(module.split(".")[:2])


def upward(graph: dict[str, set[str]]) -> list[str]:
    """Imports from a room on a higher floor.

    Raises:
        KeyError: when a room has no floor.
    """
    floor = {room: number for number, room in enumerate(FLOORS)}
    pairs = [(a, b) for a, targets in graph.items() for b in sorted(targets - {"app", "trainers"})]
    return [f"{a} -> {b}" for a, b in pairs if floor[room_of(a)] < floor[room_of(b)]]


def test_no_import_goes_up_a_floor() -> None:
    assert upward(import_graph(SOURCES, ROOT)) == []


def test_an_import_that_goes_up_would_be_seen() -> None:
    """Control, and a room that nobody gave a floor."""
    assert upward({"trainers.model.load": {"trainers.data.layout", "trainers.parallel.fsdp"}}) == [
        "trainers.model.load -> trainers.parallel.fsdp"
    ]
    with pytest.raises(KeyError, match=r"trainers\.attic"):
        upward({"trainers.attic.x": {"trainers.data.layout"}})


def test_no_circle_among_modules() -> None:
    assert circle_in(import_graph(SOURCES, ROOT)) == []


def test_a_circle_would_be_seen(tmp_path: Path) -> None:
    """Control: an import within a function closes it."""
    (tmp_path / "a.py").write_text("import b\n")
    (tmp_path / "b.py").write_text("def f():\n    from c import g\n")
    (tmp_path / "c.py").write_text("g = 1\n")
    assert circle_in(import_graph(sorted(tmp_path.glob("*.py")), tmp_path)) == []
    (tmp_path / "c.py").write_text("from a import x\n")
    assert set(circle_in(import_graph(sorted(tmp_path.glob("*.py")), tmp_path))) == {"a", "b", "c"}


@pytest.mark.parametrize("path", SOURCES, ids=lambda path: str(path.relative_to(ROOT)))
def test_files_and_functions_stay_small(path: Path) -> None:
    text = path.read_text(encoding="utf-8")
    assert len(text.splitlines()) <= 500
    functions = [node for node in ast.walk(ast.parse(text)) if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef)]
    long = {node.name: node.end_lineno - node.lineno + 1 for node in functions if node.end_lineno}
    assert {name: lines for name, lines in long.items() if lines > 80} == {}


def test_the_shared_rooms_import_no_torch() -> None:
    modules = [name for name in import_graph(SOURCES, ROOT) if room_of(name) in (*SHARED, "trainers.embedded")]
    assert len(modules) > 20
    code = f"import sys; {'; '.join(f'import {name}' for name in sorted(modules))}; print('torch' in sys.modules)"
    done = subprocess.run([sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "False"


@pytest.mark.parametrize("path", SOURCES, ids=lambda path: str(path.relative_to(ROOT)))
def test_no_shell_and_no_pickle(path: Path) -> None:
    text = path.read_text(encoding="utf-8")
    for word in ("shell=True", "os.system(", "pickle.load", "torch.load(", "torch.save(", "trust_remote_code=True"):
        assert word not in text


BARE = re.compile("one|found|told|said|words|asked|here|whole|kept|shown|made|mine|rest|place|given|named|way|who|what")
"""Function words: they say nothing of what a value is."""


def bare_names(tree: ast.AST) -> list[str]:
    """Names without a meaning that a module gives to values, attributes, parameters, functions and classes."""
    names: list[str] = []
    for node in ast.walk(tree):
        match node:
            case ast.Name(id=name, ctx=ast.Store()) | ast.Attribute(attr=name, ctx=ast.Store()) | ast.arg(arg=name):
                names.append(name)
            case ast.FunctionDef(name=name) | ast.AsyncFunctionDef(name=name) | ast.ClassDef(name=name):
                names.append(name)
    return [name for name in names if BARE.fullmatch(name.strip("_").lower())]


def test_names_say_what_a_thing_is() -> None:
    bare = {str(path.relative_to(ROOT)): bare_names(ast.parse(path.read_text(encoding="utf-8"))) for path in SOURCES}
    assert {path: names for path, names in bare.items() if names} == {}


def test_a_bare_name_would_be_seen() -> None:
    """Control: a value, an attribute, a parameter, a loop's variable, a function; words inside a name are fine."""
    text = (
        "def told(way, by_hand):\n    found = way\n    self._kept = [one for one in found]\n    rest_of_rows = found\n"
    )
    assert sorted(bare_names(ast.parse(text))) == ["_kept", "found", "one", "told", "way"]


def strange_arguments(tree: ast.AST) -> list[str]:
    """Names that a docstring explains under `Args:` and that neither the function nor the class takes."""
    strange = []
    for node in ast.walk(tree):
        if not isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef):
            continue
        _, _, section = (ast.get_docstring(node) or "").partition("Args:\n")
        section = re.split(r"^\S", section, maxsplit=1, flags=re.MULTILINE)[0]
        functions = [node] if not isinstance(node, ast.ClassDef) else node.body
        taken = {inner.arg for function in functions if isinstance(function, ast.FunctionDef | ast.AsyncFunctionDef)
                 for inner in ast.walk(function.args) if isinstance(inner, ast.arg)}  # fmt: skip
        taken |= {field.target.id for field in functions if isinstance(field, ast.AnnAssign)
                  and isinstance(field.target, ast.Name)}  # fmt: skip
        strange += [name for name in re.findall(r"^    (\w+): ", section, re.MULTILINE) if name not in taken]
    return strange


def test_docstrings_explain_the_arguments_that_there_are() -> None:
    bad = {
        str(path.relative_to(ROOT)): strange_arguments(ast.parse(path.read_text(encoding="utf-8"))) for path in SOURCES
    }
    assert {path: names for path, names in bad.items() if names} == {}


def test_an_argument_that_is_gone_would_be_seen() -> None:
    """Control."""
    arguments = "Args:\n        a: first.\n        c: second.\n\n    Returns:\n        d: sum.\n"
    text = f'def f(a, b):\n    """Adds.\n\n    {arguments}    """\n'
    assert strange_arguments(ast.parse(text)) == ["c"]


READERS_OF_TEXT = {
    "startswith",
    "endswith",
    "removeprefix",
    "removesuffix",
    "partition",
    "rpartition",
    "split",
    "replace",
}


def mistakes_read_as_text(tree: ast.AST) -> list[int]:
    """Lines in which the sentences of a `ConfigError` are taken apart, one by one or joined."""
    sentences: set[str] = set()
    for node in ast.walk(tree):
        if isinstance(node, ast.comprehension | ast.For) and ast.unparse(node.iter).endswith(".lines"):
            sentences.add(ast.unparse(node.target))
    found = []
    for node in ast.walk(tree):
        if not isinstance(node, ast.Call) or not isinstance(node.func, ast.Attribute):
            continue
        owner, method = ast.unparse(node.func.value), node.func.attr
        texts = [owner] if method in READERS_OF_TEXT else list(map(ast.unparse, node.args)) if owner == "re" else []
        found += [node.lineno for text in texts if text in sentences or ".lines" in text or ".problem" in text]
    return found


@pytest.mark.parametrize("path", SOURCES, ids=lambda path: str(path.relative_to(ROOT)))
def test_a_mistake_is_found_by_its_parts(path: Path) -> None:
    """Its option, value, problem and remedy are there; the sentence is for people."""
    tree = ast.parse(path.read_text(encoding="utf-8"))
    raises = "ConfigError" in {node.id for node in ast.walk(tree) if isinstance(node, ast.Name)}
    assert path.name == "mistakes.py" or not raises or not mistakes_read_as_text(tree)


@pytest.mark.parametrize(
    "code",
    [
        'error.lines[0].removeprefix("strategy ddp: ")',
        '[line for line in error.lines if line.startswith("seed")]',
        're.match(r"\\w+", "; ".join(error.lines))',
        'mistake.problem.startswith("is ")',
    ],
)
def test_a_mistake_read_as_text_would_be_seen(code: str) -> None:
    assert mistakes_read_as_text(ast.parse(code))
    assert not mistakes_read_as_text(ast.parse('[one.option.partition(".")[0] for one in error.mistakes]'))
