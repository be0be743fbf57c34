"""The public surface, what may import what, and how large things may be."""

import ast
import re
import sys
from collections import Counter
from collections.abc import Iterator
from pathlib import Path

import pytest

import actnn
import quant_gru

ROOT = Path(quant_gru.__file__).parent

PUBLIC = {
    "CalibrationError",
    "ConfigError",
    "CustomGRU",
    "FrozenQuantGRU",
    "FrozenQuantGRUCell",
    "OperatorConfig",
    "ParameterError",
    "QuantConfig",
    "QuantGRU",
    "QuantGRUCell",
    "QuantGRUError",
    "QuantGRUWarning",
    "__version__",
    "calibrate_model",
    "convert_model",
    "default_config_path",
    "export_model_params",
    "float_state_dict",
    "freeze_model",
    "load_frozen",
    "load_model_params",
    "export_encodings",
    "load_encodings",
    "export_onnx",
    "export_step_onnx",
    "onnx_translations",
    "operator_gain",
    "operator_sqnr",
}

ACTNN_PUBLIC = {
    "ActNNError",
    "ActNNWarning",
    "Choice",
    "DataLoader",
    "Estimate",
    "Plan",
    "QBNScheme",
    "QModule",
    "QScheme",
    "Record",
    "Report",
    "Saving",
    "TensorInfo",
    "calc_precision",
    "compress",
    "compressed",
    "compute_tensor_bytes",
    "config",
    "estimate",
    "fit",
    "get_memory_usage",
    "in_chunks",
    "ops",
    "report",
    "set_optimization_level",
    "uncompress",
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
    "export",
    "modules",
    "conversion",
    "analysis",
]
LAYERS = {room: set(ROOMS[:index]) for index, room in enumerate(ROOMS)}
LAYERS["demo"] = {*ROOMS, ""}
LAYERS["__init__"] = set(ROOMS)
LAYERS["cli"] = {*LAYERS["demo"], "demo"}
LAYERS["__main__"] = {"cli"}

OUTSIDE = {
    "_errors": set(),
    "config": {"pydantic"},
    "integer": {"torch", "numpy"},
    "kernels": {"torch", "cuda", "kernel_runtime"},
    "export": {"torch", "numpy", "onnx_ir", "onnxruntime", "onnxscript", "safetensors"},
}


RUNTIME = ROOT.parent / "kernel_runtime"
ACTNN = ROOT.parent / "actnn"
ACTNN_FILES = sorted(ACTNN.rglob("*.py"))

# The same for actnn.
ACTNN_ROOMS = [
    "_errors",
    "codec",
    "allocation",
    "saving",
    "adapting",
    "layers",
    "planning",
    "notes",
]
ACTNN_LAYERS = {room: set(ACTNN_ROOMS[:index]) for index, room in enumerate(ACTNN_ROOMS)}
ACTNN_LAYERS["__init__"] = set(ACTNN_ROOMS)

# The largest of each kind: figures that may only fall.
LARGEST = {
    "files in a folder": 25,
    "modules at the top of quant_gru": 3,
    "lines of a Python file": 405,
    "lines of a Python function": 73,
    "lines of a CUDA file": 392,
    "lines of a kernel": 346,
    "lines of a C++ file": 435,
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
            module = node.module or ""
            for alias in node.names:
                child = ROOT.parent.joinpath(*module.split("."), alias.name)
                files = (child, child.with_suffix(".py"), child.with_suffix(".pyi"))
                known = any(file.exists() for file in files)
                yield f"{module}.{alias.name}" if known else module


FILES = sorted(ROOT.rglob("*.py"))


def test_public_names_are_frozen():
    assert set(quant_gru.__all__) == PUBLIC
    assert all(hasattr(quant_gru, name) for name in PUBLIC)


def test_public_names_of_actnn_are_frozen():
    assert set(actnn.__all__) == ACTNN_PUBLIC
    assert all(hasattr(actnn, name) for name in ACTNN_PUBLIC)


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
            allowed = OUTSIDE[room] | set(sys.stdlib_module_names)
            assert top in allowed, f"{room} imports {module}"


def test_there_are_no_circles():
    """Every file's imports, followed to the end, never come back to it."""
    names = {
        path: ".".join((folder.name, *path.relative_to(folder).with_suffix("").parts))
        for folder, files in ((ROOT, FILES), (ACTNN, ACTNN_FILES))
        for path in files
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


RUNTIME_FILES = sorted(RUNTIME.rglob("*.py"))


@pytest.mark.parametrize("path", RUNTIME_FILES, ids=lambda path: str(path.relative_to(RUNTIME)))
def test_the_runtime_imports_nothing_of_the_package(path):
    for module in imports(path):
        top = module.partition(".")[0]
        assert top not in ("quant_gru", "actnn"), f"{path.name} imports {module}"


@pytest.mark.parametrize("path", ACTNN_FILES, ids=lambda path: str(path.relative_to(ACTNN)))
def test_imports_of_actnn_go_down(path):
    room = path.relative_to(ACTNN).parts[0].removesuffix(".py")
    outside = {"torch", "numpy", "kernel_runtime", *sys.stdlib_module_names}
    for module in imports(path):
        top, _, rest = module.partition(".")
        if top == "actnn":
            target = rest.partition(".")[0]
            assert target in ACTNN_LAYERS[room] | {room}, f"{room} imports {module}"
        else:
            allowed = outside | ({"matplotlib", "rich"} if room == "planning" else set())
            assert top in allowed, f"{room} imports {module}"


def test_the_runtime_includes_nothing_of_the_package():
    files = [path for path in RUNTIME.rglob("*") if path.suffix in (".cu", ".cuh", ".cpp", ".hpp")]
    assert len(files) > 5
    for path in files:
        for name in re.findall(r'#include "(.*)"', path.read_text(encoding="utf-8")):
            assert name.startswith("kernel_runtime/"), f"{path.name} includes {name}"


def test_the_runtime_names_no_gru():
    for path in sources(".py", ".pyi", ".cu", ".cuh", ".cpp", ".hpp"):
        if path.is_relative_to(RUNTIME):
            found = re.search(r"GRU|(?<![a-z])gru(?![a-z])|\b(?:qg|QG)_", path.read_text("utf-8"))
            assert found is None, f"{path.name} names {found and found[0]}"


def sources(*suffixes: str) -> Iterator[Path]:
    for root in (ROOT, RUNTIME, ACTNN):
        for path in root.rglob("*"):
            if path.suffix in suffixes and "__pycache__" not in path.parts:
                yield path


def lines_of(path: Path) -> int:
    return path.read_text(encoding="utf-8").count("\n")


def python_functions(path: Path) -> Iterator[int]:
    """Lines of each function, without its decorators."""
    for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
        if isinstance(node, ast.FunctionDef):
            assert node.end_lineno is not None
            yield node.end_lineno - node.lineno + 1


def kernels(path: Path) -> Iterator[int]:
    """Lines of each __global__ function."""
    text = path.read_text(encoding="utf-8")
    for found in re.finditer(r"__global__[^;{]*\{", text):
        depth, at = 1, found.end()
        while depth:
            depth += {"{": 1, "}": -1}.get(text[at], 0)
            at += 1
        yield text.count("\n", found.start(), at) + 1


def test_what_is_large_does_not_grow():
    written = [".py", ".pyi", ".cu", ".cuh", ".cpp", ".hpp", ".inl", ".h", ".md", ".json"]
    cuda = list(sources(".cu", ".cuh"))
    python = list(sources(".py"))
    cpp = list(sources(".cpp", ".hpp", ".inl"))
    found = {
        "files in a folder": max(Counter(path.parent for path in sources(*written)).values()),
        "modules at the top of quant_gru": len(list(ROOT.glob("*.py"))),
        "lines of a Python file": max(map(lines_of, python)),
        "lines of a Python function": max(n for path in python for n in python_functions(path)),
        "lines of a CUDA file": max(map(lines_of, cuda)),
        "lines of a kernel": max(n for path in cuda for n in kernels(path)),
        "lines of a C++ file": max(map(lines_of, cpp)),
    }
    for what, size in found.items():
        most = LARGEST[what]
        assert size <= most, f"{what}: {size}, where {most} was the most; split what has grown"
        assert size == most, f"{what}: {size}; lower the figure here from {most}"
