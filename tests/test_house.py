"""The public surface, what may import what, and how much there is."""

import ast
import inspect
import re
import sys
from collections.abc import Iterator
from pathlib import Path

import torch

import actnn
import quant_gru
from quant_gru.modules.cell import QuantGRUCell

ROOT = Path(__file__).parents[1]
SRC = ROOT / "src"
OURS = ("quant_gru", "actnn")
PACKAGES = {name: SRC / name for name in OURS}

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
    "Stream",
    "__version__",
    "allocate_bits",
    "calibrate_model",
    "compare",
    "convert_model",
    "default_config_path",
    "find_grus",
    "export_model_params",
    "float_state_dict",
    "freeze_model",
    "load_frozen",
    "load_model_params",
    "export_encodings",
    "load_encodings",
    "export_onnx",
    "export_step_onnx",
    "onnx_operator_library",
    "onnx_translations",
    "operator_gain",
    "operator_sqnr",
    "quantize_keras",
    "quantize_onnx",
    "report",
    "sensitivity",
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

# The rooms of each package, from the lowest: a room imports only rooms below it.
ROOMS = {
    "quant_gru": [
        "kernel_runtime",
        "errors",
        "config",
        "integer",
        "kernels",
        "calibration",
        "parameters",
        "execution",
        "autograd",
        "torch_ops",
        "interchange",
        "modules",
        "whole_models",
        "analysis",
        "model_files",
        "__init__",
        "demo",
        "cli",
        "__main__",
    ],
    "actnn": [
        "errors",
        "codec",
        "allocation",
        "saving",
        "adapting",
        "layers",
        "planning",
        "actnn_interface",
        "__init__",
    ],
}

# What a room may import from outside of its package, besides the standard library. Rooms that
# are not named here import what they need.
OUTSIDE = {
    "quant_gru": {
        "kernel_runtime": {"torch", "numpy", "cuda"},
        "errors": set(),
        "config": {"pydantic"},
        "integer": {"torch", "numpy"},
        "kernels": {"torch", "cuda"},
        "interchange": {
            "torch",
            "numpy",
            "onnx_ir",
            "onnxruntime",
            "onnxscript",
            "safetensors",
        },
    },
    "actnn": {
        room: {"torch", "numpy", "quant_gru"}
        | ({"matplotlib", "rich"} if room == "planning" else set())
        for room in ROOMS["actnn"]
    },
}

# Lines of src and cpp. A change that removes lowers the figure; a new capability raises it, and
# its commit says by how much.
MOST_LINES = 107_774

# How many files and folders inside a folder stand above each other.
MOST_FLOORS = 7
HIGHER = {
    "src/actnn/saving": 9,
    "src/quant_gru/integer": 8,
}

# Classes of ours between a module and PyTorch's.
MOST_BASES = 2


# Folders that native sources name files from.
INCLUDED = [
    SRC,
    SRC / "quant_gru",
    SRC / "quant_gru/kernels",
    ROOT / "cpp/src",
    ROOT / "cpp/include",
]


def files_of(*suffixes: str) -> Iterator[Path]:
    for folder in (SRC, ROOT / "cpp"):
        for path in sorted(folder.rglob("*")):
            if path.suffix in suffixes and "__pycache__" not in path.parts and path.is_file():
                yield path


def module_file(name: str) -> Path | None:
    """The file of a module of ours: `a.b.c` or the package `a.b.c`."""
    path = SRC.joinpath(*name.split("."))
    for file in (path.with_suffix(".py"), path / "__init__.py", path.with_suffix(".pyi")):
        if file.is_file():
            return file
    return None


def modules_of(path: Path) -> Iterator[str]:
    """Names of the modules imported anywhere in a file, type-checking blocks included."""
    for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, f"{path}: relative import"
            module = node.module or ""
            for alias in node.names:
                name = f"{module}.{alias.name}"
                yield name if module_file(name) else module


def includes_of(path: Path) -> Iterator[str]:
    yield from re.findall(r'^\s*#\s*include "(.*)"', path.read_text(encoding="utf-8"), re.M)


def arrows() -> dict[Path, set[Path]]:
    """The files of ours that each file imports or includes."""
    found: dict[Path, set[Path]] = {}
    for path in files_of(".py"):
        targets = {module_file(name) for name in modules_of(path)}
        found[path] = {target for target in targets if target}
    for path in files_of(".cu", ".cuh", ".cpp", ".hpp", ".inl", ".h", ".c"):
        folders = (path.parent, *INCLUDED)
        found[path] = {
            target
            for name in includes_of(path)
            for target in [next((f / name for f in folders if (f / name).is_file()), None)]
            if target
        }
    return {
        path: {target.resolve() for target in targets} - {path} for path, targets in found.items()
    }


def heights(graph: dict[Path, set[Path]]) -> dict[Path, int]:
    """The floor of each node: one above the highest that it points to.

    Raises:
        AssertionError: For a circle, which it names.
    """
    done: dict[Path, int] = {}

    def visit(node: Path, trail: tuple[Path, ...]) -> int:
        assert node not in trail, " -> ".join(p.name for p in (*trail, node))
        if node not in done:
            below = (visit(target, (*trail, node)) for target in sorted(graph.get(node, ())))
            done[node] = 1 + max(below, default=0)
        return done[node]

    for node in sorted(graph):
        visit(node, ())
    return done


def inside(folder: Path, graph: dict[Path, set[Path]]) -> dict[Path, set[Path]]:
    """The arrows between the files and folders that stand directly in `folder`."""

    def room(path: Path) -> Path:
        return folder / path.relative_to(folder).parts[0]

    found: dict[Path, set[Path]] = {}
    for path, targets in graph.items():
        if path.is_relative_to(folder):
            rooms = {room(target) for target in targets if target.is_relative_to(folder)}
            found.setdefault(room(path), set()).update(rooms - {room(path)})
    return found


def test_public_names_are_frozen():
    for package, names in ((quant_gru, PUBLIC), (actnn, ACTNN_PUBLIC)):
        assert set(package.__all__) == names
        assert all(hasattr(package, name) for name in names)


def test_every_room_is_known():
    for package, folder in PACKAGES.items():
        files = [path for path in files_of(".py", ".pyi") if path.is_relative_to(folder)]
        rooms = {path.relative_to(folder).parts[0].split(".")[0] for path in files}
        assert rooms == set(ROOMS[package])


def test_imports_go_down():
    for package in OURS:
        for path in PACKAGES[package].rglob("*.py"):
            room = path.relative_to(PACKAGES[package]).parts[0].removesuffix(".py")
            below = ROOMS[package][: ROOMS[package].index(room) + 1]
            for module in modules_of(path):
                top, _, rest = module.partition(".")
                if top == package:
                    target = rest.partition(".")[0] or "__init__"
                    assert target in below, f"{path.name}: {room} imports {module}"


def test_rooms_import_only_what_they_may():
    for package, rooms in OUTSIDE.items():
        for path in PACKAGES[package].rglob("*.py"):
            room = path.relative_to(PACKAGES[package]).parts[0].removesuffix(".py")
            if room in rooms:
                allowed = {package, *rooms[room], *sys.stdlib_module_names}
                for module in modules_of(path):
                    assert module.partition(".")[0] in allowed, f"{path.name} imports {module}"


def test_actnn_uses_only_the_runtime_of_quant_gru():
    for path in PACKAGES["actnn"].rglob("*.py"):
        for module in modules_of(path):
            if module.startswith("quant_gru"):
                assert module.startswith("quant_gru.kernel_runtime"), f"{path.name}: {module}"


def test_there_are_no_circles():
    assert len(heights(arrows())) > 500


def test_no_folder_has_too_many_floors():
    graph = arrows()
    folders = {path.parent for path in graph} | {path.parent.parent for path in graph}
    for folder in sorted(folders - {SRC, ROOT, ROOT / "cpp"} - set(PACKAGES.values())):
        name = folder.relative_to(ROOT).as_posix()
        most = HIGHER.get(name, MOST_FLOORS)
        floors = max(heights(inside(folder, graph)).values())
        assert floors <= most, f"{name} has {floors} floors, where {most} is the most"


def test_modules_are_not_towers():
    ours = [
        quant_gru.QuantGRU,
        quant_gru.CustomGRU,
        QuantGRUCell,
        quant_gru.FrozenQuantGRU,
        quant_gru.FrozenQuantGRUCell,
        actnn.QModule,
    ]
    for module in ours:
        assert issubclass(module, torch.nn.Module)
        bases = [base for base in inspect.getmro(module)[1:] if base.__module__.startswith(OURS)]
        assert len(bases) <= MOST_BASES, f"{module.__name__} derives from {bases}"


def test_the_runtime_knows_nothing_of_the_packages():
    files = list((SRC / "quant_gru/kernel_runtime").rglob("*"))
    written = [path for path in files if path.suffix in (".py", ".pyi", ".cu", ".cuh", ".cpp")]
    written += [path for path in files if path.suffix == ".hpp"]
    assert len(written) > 20
    for path in written:
        text = path.read_text(encoding="utf-8").replace("quant_gru.kernel_runtime", "")
        found = re.search(r"GRU|(?<![a-z])gru(?![a-z])|\b(?:qg|QG)_", text)
        assert found is None, f"{path.name} names {found and found[0]}"
        for name in includes_of(path):
            assert name.startswith("kernel_runtime/"), f"{path.name} includes {name}"


def test_lines_do_not_grow_unsaid():
    written = (".py", ".pyi", ".cu", ".cuh", ".cpp", ".hpp", ".inl", ".h", ".c", ".in", ".cmake")
    lines = sum(path.read_text(encoding="utf-8").count("\n") for path in files_of(*written))
    assert lines <= MOST_LINES, f"{lines} lines, where {MOST_LINES} is the ceiling"
