"""The public surface, and what may import what."""

import ast
from pathlib import Path

import pytest

import quant_gru

ROOT = Path(quant_gru.__file__).parent

PUBLIC = {
    "CalibrationError",
    "ConfigError",
    "CustomGRU",
    "FrozenQuantGRU",
    "OperatorConfig",
    "ParameterError",
    "QuantConfig",
    "QuantGRU",
    "QuantGRUError",
    "QuantGRUWarning",
    "__version__",
    "calibrate_model",
    "convert_model",
    "default_config_path",
    "float_state_dict",
    "operator_sqnr",
}

# A room may import from the rooms named here, besides itself: those below it.
ROOMS = [
    "_errors",
    "config",
    "integer",
    "kernels",
    "calibration",
    "parameters",
    "execution",
    "autograd",
    "torch_ops",
    "modules",
    "conversion",
    "analysis",
]
LAYERS = {room: set(ROOMS[:index]) for index, room in enumerate(ROOMS)}
LAYERS["execution"] |= {"autograd"}  # plan_cache keeps the prepared step of training
LAYERS["demo"] = {*ROOMS, ""}
LAYERS["__init__"] = set(ROOMS)
LAYERS["cli"] = {*LAYERS["demo"], "demo"}
LAYERS["__main__"] = {"cli"}

OUTSIDE = {
    "_errors": set(),
    "config": {"pydantic"},
    "integer": {"torch", "numpy"},
    "kernels": {"torch", "cuda", "kernel_runtime"},
}


def room_of(path: Path) -> str:
    return path.relative_to(ROOT).parts[0].removesuffix(".py")


def imports(path: Path):
    """Module names imported anywhere in a file, type-checking blocks included."""
    for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, f"{path}: relative import"
            if node.module == "quant_gru":
                for alias in node.names:
                    child = ROOT / alias.name
                    known = child.is_dir() or child.with_suffix(".py").exists()
                    yield f"quant_gru.{alias.name}" if known else "quant_gru"
            else:
                yield node.module or ""


FILES = sorted(ROOT.rglob("*.py"))


def test_public_names_are_frozen():
    assert set(quant_gru.__all__) == PUBLIC
    assert all(hasattr(quant_gru, name) for name in PUBLIC)


def test_every_room_is_known():
    assert {room_of(path) for path in FILES} == set(LAYERS)


@pytest.mark.parametrize("path", FILES, ids=lambda path: str(path.relative_to(ROOT)))
def test_imports_go_down(path):
    room = room_of(path)
    for module in imports(path):
        top, _, rest = module.partition(".")
        if top == "quant_gru":
            target = rest.partition(".")[0]
            assert target in LAYERS[room] | {room}, f"{room} imports {module}"
        elif room in OUTSIDE:
            allowed = OUTSIDE[room] | set(__import__("sys").stdlib_module_names)
            assert top in allowed, f"{room} imports {module}"


def test_there_are_no_circles():
    """Every file's imports, followed to the end, never come back to it."""
    names = {
        path: ".".join(("quant_gru", *path.relative_to(ROOT).with_suffix("").parts))
        for path in FILES
    }
    known = {name.removesuffix(".__init__") for name in names.values()}
    graph = {
        name.removesuffix(".__init__"): {m for m in imports(path) if m in known}
        for path, name in names.items()
    }
    done: set[str] = set()

    def visit(name: str, trail: tuple[str, ...]) -> None:
        assert name not in trail, " -> ".join((*trail, name))
        if name in done:
            return
        for target in sorted(graph[name]):
            visit(target, (*trail, name))
        done.add(name)

    for name in sorted(graph):
        visit(name, ())
