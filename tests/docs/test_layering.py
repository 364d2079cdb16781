"""Dependencies point one way, the kernel knows no schedule by name, public names are pinned."""

from __future__ import annotations

import ast
import re
import subprocess
import sys
from collections.abc import Iterator
from importlib import import_module
from importlib.util import find_spec
from pathlib import Path

import pytest

import schedules

ALLOWED = {
    "schedules": {"numpy", "schedules"},
    "collectives": {"jax", "numpy", "collectives"},
    "pipeline": {"jax", "numpy", "scipy", "flax", "optax", "schedules", "collectives", "pipeline"},
}

# Drawing is optional: loaded by the function that draws, as the fresh process below proves; so are
# lines of progress, event files and checkpoints.
LAZY = {
    ("schedules", "draw.py"): {"matplotlib"},
    ("pipeline", "arrays.py"): {"orbax"},
    ("pipeline", "records.py"): {"rich", "tensorboardX"},
}

PUBLIC = {
    "schedules": """
        Action Choice Costs Difference Explanation Kind Program Report Schedule ScheduleError auto
        build check check_program differences equal_time from_orders lower names simulate
    """,
    "collectives": """
        DATA STAGE TENSOR axis_size check_divides check_mesh column_input describe_mesh exchange
        from_rank join_sequence linear_cross_entropy local make_mesh mean_over ring_shift row_output
        shift_left shift_right split_sequence sum_over vary varying_axes vocabulary_cross_entropy
        vocabulary_embedding
    """,
    "pipeline": """
        Calibration CalibrationError CrossEntropy DoesNotFitError ParallelConfig Parts
        Pipeline Plans add_loss check_sharding describe_sharding generate initialize
        local_rows make_optimizer plan sample shard_batch shard_optimizer split with_losses
    """,
}


def sources(package: str) -> list[Path]:
    """The package's files, in the checkout or in site-packages."""
    spec = find_spec(package)
    assert spec is not None
    assert spec.submodule_search_locations
    return sorted(Path(next(iter(spec.submodule_search_locations))).rglob("*.py"))


def parsed(package: str) -> Iterator[tuple[str, ast.Module]]:
    for path in sources(package):
        yield path.name, ast.parse(path.read_text(encoding="utf-8"))


@pytest.mark.parametrize("package", ALLOWED)
def test_imports_point_one_way(package: str) -> None:
    wrong = []
    for file, tree in parsed(package):
        allowed = ALLOWED[package] | LAZY.get((package, file), set()) | set(sys.stdlib_module_names)
        for node in ast.walk(tree):
            if isinstance(node, ast.Import):
                modules = [alias.name for alias in node.names]
            elif isinstance(node, ast.ImportFrom):
                modules = ["." * node.level + (node.module or "")]
            else:
                continue
            roots = {module.split(".")[0] for module in modules}
            wrong += [
                f"{package}/{file}:{node.lineno} imports {root or 'relatively'}"
                for root in roots - allowed
            ]
    assert not wrong


@pytest.mark.few
@pytest.mark.parametrize(
    ("package", "unwanted"),
    [
        ("schedules", "jax jaxlib flax optax matplotlib collectives pipeline"),
        ("collectives", "flax optax matplotlib schedules pipeline"),
    ],
)
def test_a_fresh_process_loads_no_more_than_the_layer_needs(package: str, unwanted: str) -> None:
    code = f"import sys, {package}; print(*(set({unwanted.split()!r}) & set(sys.modules)))"
    root = Path(schedules.__file__).parents[1]
    done = subprocess.run(
        [sys.executable, "-c", code], cwd=root, capture_output=True, text=True, check=False
    )
    assert (done.returncode, done.stdout.strip()) == (0, ""), done.stderr


def test_pipeline_names_no_schedule_but_its_default() -> None:
    """If the runtime mentions a schedule's name, the design has slipped."""
    names = "|".join(map(re.escape, schedules.names()))
    pattern = re.compile(rf"(?<![A-Za-z0-9])({names}|one_f_one_b)(?![A-Za-z0-9])", re.IGNORECASE)
    wrong = []
    for file, tree in parsed("pipeline"):
        excused = excused_strings(tree)
        for node in ast.walk(tree):
            text = named_by(node)
            if id(node) not in excused and pattern.search(text):
                wrong.append(f"pipeline/{file}:{getattr(node, 'lineno', '?')} says {text!r}")
    assert not wrong


def excused_strings(tree: ast.Module) -> set[int]:
    """Default arguments (a dataclass field's default is one), and docstrings."""
    excused: list[ast.AST | None] = []
    for node in ast.walk(tree):
        if isinstance(node, ast.arguments):
            excused += [*node.defaults, *node.kw_defaults]
        if isinstance(node, ast.ClassDef):
            excused += [item.value for item in node.body if isinstance(item, ast.AnnAssign)]
        if isinstance(node, ast.Module | ast.ClassDef | ast.FunctionDef):
            first = node.body[0] if node.body else None
            excused += [first.value] if isinstance(first, ast.Expr) else []
    return {id(node) for node in excused}


def named_by(node: ast.AST) -> str:
    """The text of a string, or the name that an identifier, attribute or import stands for."""
    match node:
        case ast.Constant(value=str() as text):
            return text
        case ast.Name(id=text) | ast.Attribute(attr=text) | ast.alias(name=text):
            return text
        case ast.ImportFrom(module=str() as text):
            return text
        case ast.FunctionDef(name=text) | ast.ClassDef(name=text) | ast.keyword(arg=str() as text):
            return text
    return ""


@pytest.mark.parametrize("package", PUBLIC)
def test_public_names(package: str) -> None:
    module = import_module(package)
    names = PUBLIC[package].split()
    assert sorted(module.__all__) == sorted(names)
    assert [name for name in names if not hasattr(module, name)] == []


def test_only_public_names_are_listed() -> None:
    """Completion shows what is meant to be used; whatever is documented can be imported."""
    import pipeline
    from pipeline.vocabulary import CrossEntropy

    rooms = "decoders layers planner processes vocabulary weights"
    assert dir(pipeline) == sorted([*pipeline.__all__, "__version__", *rooms.split()])
    assert [name for name in dir(pipeline) if not hasattr(pipeline, name)] == []
    assert pipeline.CrossEntropy is CrossEntropy
    assert re.fullmatch(r"\d+\.\d+\.\d+", pipeline.__version__)


def test_tests_lie_in_folders_that_shadow_no_package() -> None:
    """A folder tests/schedules would shadow the package wherever tests/ is on the path."""
    tests = Path(__file__).parents[1]
    folders = {path.name for path in tests.iterdir() if path.is_dir()}
    assert not folders & set(ALLOWED)
    assert not list(tests.glob("test_*.py"))
