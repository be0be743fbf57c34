"""Tensors near 0 by which backward divides, so that a small error is a large one of the gradient.

Hooks see a tensor before it is known which operation saves it. Its node is in the graph of what is
saved later, and in the first step the last tensors are held beside their codes until it is found
there (`Recent`). The backward of the first steps, and later of every 16th, finds what is left
(`divides`), such as operations after the last saved tensor, and sums that come near 0 later.
Whoever has found one, later steps keep tensors of its kind exact. Where the numbers are near 0, the
gradient is large, too, so that operands of the products from which the numbers come have to be
exact.
"""

from __future__ import annotations

import math
import sys
import warnings
import weakref
from collections import defaultdict
from collections.abc import Callable
from functools import partial
from itertools import chain
from threading import local
from types import FrameType
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.utils import checkpoint

from actnn.errors import ActNNWarning
from actnn.saving.exclusions import FORMS
from actnn.saving.held import Compressed, Kept, View
from actnn.saving.sides import Intervals, compares, intervals_of, order_of

LEAST_BITS = 4  # with fewer, all is noise
_UNKNOWN = torch.tensor(math.nan)  # a divisor of which nothing is known
SOLVED = frozenset(
    "linalg_inv_ex _linalg_solve_ex linalg_solve_triangular linalg_cholesky_ex _linalg_eigh "
    "linalg_eig _linalg_svd linalg_qr linalg_lu linalg_lu_factor_ex linalg_lu_solve _linalg_det "
    "_linalg_slogdet linalg_lstsq linalg_pinv linalg_householder_product ormqr cholesky_solve "
    "cholesky_inverse triangular_solve logaddexp logaddexp2 special_log_ndtr".split()
)
"""Operators whose backward solves equations with what they save, which may be nearly singular, or
takes the exponential of a difference."""
_SOLVING = frozenset(name.title().replace("_", "") + "Backward0" for name in SOLVED)
# Of which matrices of covariances are made, beside products.
_KERNELS = frozenset(f"{name}Backward0" for name in "Exp Cdist EuclideanDist Sqrt".split())
_BY_OPERAND = [
    f"{name}Backward0"
    for name in "Log Log2 Log10 Prod Cumprod Lgamma Digamma Polygamma Copysign Angle SpecialEntr "
    "SpecialI1 SpecialI1E".split()
] + ["ProdBackward1"]
_BY_RESULT = [f"{n}Backward0" for n in "Sqrt Rsqrt Reciprocal Std Hypot SpecialNdtri".split()]
_DIVISORS: dict[str, Callable[[Any, Callable[[], Tensor]], Tensor | None]] = {
    **dict.fromkeys(_BY_OPERAND + _BY_RESULT, lambda node, x: x()),
    **dict.fromkeys(_SOLVING, lambda node, x: _UNKNOWN),
    **dict.fromkeys(("CdistBackward0", "PdistBackward0"), lambda node, x: node._saved_result),
    "DivBackward0": lambda node, x: node._saved_other,
    "AddcdivBackward0": lambda node, x: node._saved_tensor2,
    "Atan2Backward0": lambda node, x: torch.hypot(node._saved_self, node._saved_other),
    **dict.fromkeys(
        ("XlogyBackward0", "SpecialZetaBackward0", "SpecialZetaBackward1"),
        lambda node, x: node._saved_other,
    ),
    "SpecialXlog1PyBackward0": lambda node, x: 1 + node._saved_other,
    "StdMeanBackward0": lambda node, x: node._saved_result0,
    "Log1PBackward0": lambda node, x: 1 + x(),
    "PowBackward0": lambda node, x: x() if node._saved_exponent < 1 else None,
    "PowBackward1": lambda node, x: node._saved_self if node._saved_exponent.min() < 1 else None,
    **dict.fromkeys(
        (f"{name}Backward0" for name in "Acos Acosh Asin Atanh Erfinv".split()),
        lambda node, x: 1 - x().square(),
    ),
    **dict.fromkeys(
        ("LogitBackward0", "BinaryCrossEntropyBackward0"), lambda node, x: x() - x().square()
    ),
    **dict.fromkeys(
        ("NormBackward1", "LinalgVectorNormBackward0"),
        lambda node, x: node._saved_result if order_of(node) >= 1 else x(),
    ),
}
_INVERSE = {"RsqrtBackward0", "ReciprocalBackward0"}  # the result is the less, the larger it is
_DIVISOR_AT = {f"{n}Backward0": 1 for n in "Div Xlogy SpecialXlog1Py SpecialZeta".split()}
_DIVISOR_AT["AddcdivBackward0"] = 2  # else 0
_FORMS = FORMS | {
    f"{name}Backward{form}"
    for name in "Slice Select Split Add Sub Rsub Neg Sum Mean Clamp ClampMin ClampMax "
    "Gather Index IndexSelect Unbind SplitWithSizes UnsafeSplit Cat Stack MaskedFill MaskedSelect "
    "Where Roll Flip Repeat Squeeze Maximum Minimum Max Min Topk Sort Cumsum ScatterAdd Scatter "
    "IndexAdd IndexPut IndexFill ConstantPadNd AvgPool2D AvgPool3D AdaptiveAvgPool2D PixelShuffle "
    "UpsampleBilinear2D UpsampleNearest2D NanToNum Diagonal Take Tril Triu".split()
    for form in (0, 1, 2)
}
# Through which gradients pass element by element.
_PASSED = _FORMS | {
    f"{name}Backward{form}"
    for name in "Mul Pow Abs Div Lerp Addcmul Prod Cumprod Complex Conj ViewAsReal "
    "ViewAsComplex".split()
    for form in (0, 1)
}
# Whose results are of many numbers, so that a few do not bring them near 0.
_OF_MANY = frozenset(
    f"{name}Backward{form}"
    for name in "Sum Mean Var VarMean Std StdMean Norm LinalgVectorNorm Logsumexp Max Min Amax "
    "Amin Aminmax Cumsum Prod Cumprod AvgPool2D AvgPool3D AdaptiveAvgPool2D Cdist Pdist".split()
    for form in (0, 1, 2)
)
# Functions whose derivative is near 0 where their result is at its end. They save the result, ...
_RESULTS = frozenset(
    f"{name}Backward0"
    for name in "Sigmoid Softmax SafeSoftmax MaskedSoftmax Tanh Exp Exp2 Expm1".split()
) | {"_DerivativeBackward"}
# ... or their operand.
_SOURCES = frozenset(f"{name}Backward0" for name in "Softplus Elu LogSigmoid Erf Erfc".split())
_ENDS = _RESULTS | _SOURCES
# Whose results are made element by element.
_ELEMENTS = _PASSED - _OF_MANY | {"SqrtBackward0", "RsqrtBackward0", "ReciprocalBackward0"}
_BOUNDED = _OF_MANY | _ENDS  # whose results do not cross 0 by themselves
_PRODUCTS = frozenset(f"{name}Backward0" for name in "Mm Bmm Mv Dot".split())
_SUMS = {"SumBackward0", "SumBackward1"}
_NORMS = {"NormBackward1", "LinalgVectorNormBackward0", "SqrtBackward0"}
_PAIRS = _PRODUCTS | {"SubBackward0", "CdistBackward0", "EuclideanDistBackward0"}  # distances
_COPY = "CloneBackward0"
_SAME = FORMS | {"MulBackward0", "DivBackward0"}  # scaled
_MADE = "made of ends"  # what nodes remember of `_made_of_ends`
_NONE, _OF_LEAVES, _SOME, _ALL = range(4)
_DEPTH = 24
DIVIDED = "divided by in backward"  # the reason in records, and a mark of nodes
_LAST = "perhaps last"  # a mark of nodes by whose results a loss may divide where no hook sees it
_MOST = 24  # tensors that are held beside their codes, but for ends
_LEAF = 1 << 62  # leaves have higher sequence numbers
_KEPT = 8  # bits that are assumed of codes beside what is kept
_RUNNING = local()  # a divisor that is itself held as codes is decoded here


def divides(tensor: Tensor, bits: int, path: str | None) -> bool | Intervals:
    """Return whether the node that runs divides by numbers that codes do not tell from 0.

    The answer is the same for the nodes whose products it divides or divides by. If the node
    compares the tensor with bounds, the answer is their intervals; with tensors, it is empty.

    Args:
        tensor: The decoded tensor that it needs.
        bits: Bits of its codes.
        path: Path of the module that has saved it, for the warning; None if none is needed.
    """
    node: Any = torch._C._current_autograd_node()
    if node is None or getattr(_RUNNING, "is_inside", False):
        return False
    if compares(node):
        return intervals_of(node)
    if DIVIDED not in node.metadata:
        is_last = _is_last(node)
        if _recomputes() or not (is_last or _is_steep(node, tensor, bits)):
            return False
        if not is_last:
            _mark(node)
    if path is not None:
        warnings.warn(
            f"Backward divides by numbers near 0 at {path!r}, and codes are not exact enough "
            "there, so that the gradient of this step may be wrong. So may those of up to 15 steps "
            "before it, but for the first three. From the next step on, these tensors are kept "
            "exact. model.actnn.set_choices keeps them from the first",
            ActNNWarning,
            stacklevel=2,
        )
    return True


def _is_last(node: Any) -> bool:
    """Whether a node belongs to the end of a function, by whose result a loss may divide."""
    if _made_of_ends(node) in (_SOME, _ALL) and node.name() not in _ENDS:
        is_last = any(_LAST in each.metadata for each in _ends_of(node))
        if is_last and _is_square(node):
            _mark(node)
        return is_last
    if _LAST in node.metadata and _is_kernel(node):
        _mark(node)
    operands = _operands_of(node)
    if node.name() in _SOURCES:
        return any(_LAST in each.metadata for each in operands)
    for each in chain(*map(_ends_of, operands)):
        if not each.metadata.get(_LAST):
            each.metadata.pop(_LAST, None)
    return node.name() in _RESULTS and _LAST in node.metadata


def _recomputes() -> bool:
    """Whether torch.utils.checkpoint runs a block again: a node of it asks for what comes of it."""
    frame: FrameType | None = sys._getframe()
    while frame is not None:
        if frame.f_code.co_filename == checkpoint.__file__:
            return True
        frame = frame.f_back
    return False


def _is_steep(node: Any, tensor: Tensor, bits: int) -> bool:
    """Whether a node divides by numbers much nearer to 0 than others."""
    if _is_cosine(node, tensor):
        return True
    divisor_of = _DIVISORS.get(node.name())
    if divisor_of is None or (tensor.is_cuda and torch.cuda.is_current_stream_capturing()):
        return False
    _RUNNING.is_inside = True
    try:
        divisor = divisor_of(node, lambda: tensor)
    finally:
        _RUNNING.is_inside = False
    return divisor is not None and _is_near_0(divisor, bits, node)


def _is_near_0(divisor: Tensor, bits: int, node: Any) -> bool:
    """Whether some numbers are so much nearer to 0 than others that codes do not tell, or may be.

    Results of ends come near 0 as a model learns, but for sums that are at least 1, such as those
    of softmax. So does what is made element by element from what a layer has made.
    """
    if not divisor.numel():
        return False
    operand = node.next_functions[_DIVISOR_AT.get(node.name(), 0)][0]
    if operand is not None and node.name() not in _OF_MANY and _is_of_layers(operand):
        return True
    sizes = divisor.detach().abs()
    if operand is not None and _made_of_ends(operand) == _ALL:
        is_far = sizes.max() <= 1 if node.name() in _INVERSE else sizes.min() >= 1
        if not bool(is_far):
            return True
    least = torch.where(sizes > 0, sizes, torch.inf).min()  # divisions by 0 stay what they are
    # Decoded numbers that are not 0 are at least a step of codes from it. Also if one is NaN.
    return not bool(sizes.max() <= 2 ** (max(bits, LEAST_BITS) - 1) * least)


def _mark(node: Any) -> list[Any]:
    """Mark the nodes that have made the operands of a node, and return them."""
    solves = node.name() in _SOLVING or _is_kernel(node)
    found = _makers(_operands_of(node), _PASSED | _KERNELS if solves else _PASSED)
    marked = [each for each in found if each.name() not in _FORMS]
    for each in marked:
        each.metadata[DIVIDED] = True
    return marked


def _operands_of(node: Any) -> list[Any]:
    return [each for each, _ in node.next_functions if each is not None]


def _makers(nodes: list[Any], through: frozenset[str] = _PASSED) -> list[Any]:
    """Return nodes, and those whose results they hand on through nodes with some names."""
    found = dict.fromkeys(nodes)
    for _ in range(_DEPTH):
        passed = [node for node in nodes if node.name() in through]
        nodes = [each for node in passed for each in _operands_of(node) if each not in found]
        found.update(dict.fromkeys(nodes))
    return list(found)


def _made_of_ends(node: Any) -> int:
    """Return whether all or some of what a node hands on was made by ends, such as probabilities.

    Of attention, only one operand of a product is a result of softmax; of layers, none is.
    """
    left = [node]
    while left:
        each = left[-1]
        is_end = each.name() in _ENDS or _is_square(each)
        operands = [] if is_end or each.name() not in _PASSED | _PRODUCTS else _operands_of(each)
        unknown = [operand for operand in operands if _MADE not in operand.metadata]
        left += unknown
        if not unknown:
            left.pop()
            parts = [operand.metadata[_MADE] for operand in operands]
            least, most = min(parts, default=_NONE), max(parts, default=_NONE)
            if is_end:
                made = _ALL
            elif _sequence_of(each) < 0:
                made = _OF_LEAVES
            elif each.name() in _PRODUCTS:
                made = least if least == _ALL or (least == _SOME and len(parts) > 1) else _NONE
            else:
                mixed = most == _ALL and not {_NONE, _SOME} & set(parts)
                made = _ALL if mixed else min(most, _SOME)
            each.metadata[_MADE] = made
    return int(node.metadata[_MADE])


def _is_of_layers(node: Any) -> bool:
    """Whether a node hands on numbers of layers element by element, so that they may cross 0."""
    found = dict.fromkeys(_makers([node], _ELEMENTS))
    for each in found:
        if each.name() in _ELEMENTS:
            if not all(operand in found for operand in _operands_of(each)):
                return True  # too far away to know
        elif each.name() not in _BOUNDED and _sequence_of(each) >= 0:
            return True
    return False


def _ends_of(node: Any) -> list[Any]:
    """Return the nodes whose results have to be exact if a loss divides by the result of a node."""
    found, seen, left = [], set[Any](), [(node, _DEPTH)]
    while left:
        each, depth = left.pop()
        made = _made_of_ends(each)
        if made < _SOME or each in seen or not depth:
            continue
        seen.add(each)
        if made == _ALL:
            found.append(each)
        if each.name() in _SOURCES:
            found += _operands_of(each)
        elif _is_square(each) or _is_kernel(each):  # a loss may solve equations with it
            for maker in _makers(_operands_of(each), _PASSED | _KERNELS):
                found += [maker, *_operands_of(maker)]
        elif each.name() not in _ENDS:
            left += [(operand, depth - (made == _SOME)) for operand in _operands_of(each)]
    return found


def _is_square(node: Any) -> bool:
    """Whether a node makes the product of a tensor with itself, as covariances are."""
    return node.name() in _PRODUCTS and _is_of_one(node)


def _is_kernel(node: Any) -> bool:
    """Whether a node makes exponentials of distances within a tensor, which are covariances."""
    if node.name() != "ExpBackward0":
        return False
    makers = _makers(_operands_of(node), _PASSED | _KERNELS)
    return any(each.name() in _PAIRS and _is_of_one(each) for each in makers)


def _is_cosine(node: Any, other: Tensor | None = None) -> bool:
    """Whether a node multiplies tensors of norm 1, or divides sums of products by norms.

    If operands are alike, little is left of the gradient: what is across them.

    Args:
        node: The node.
        other: What it multiplies a tensor with, if only that has a gradient.
    """
    name, operands = node.name(), _operands_of(node)
    if name == "DivBackward0":
        return len(operands) == 2 and operands[0].name() in _SUMS and _has_norm(node)
    if name != "MulBackward0":
        return False
    alike = other is not None and list(other.shape) == list(node._input_metadata[0].shape)
    quotients = [each for each in operands if each.name() == "DivBackward0" and _has_norm(each)]
    return len(quotients) == (1 if alike and len(operands) == 1 else 2)


def _has_norm(node: Any) -> bool:
    """Whether a node divides by the norm of what its numerator is made of."""
    numerator, divisor = (*_operands_of(node), None)[:2]
    if divisor is None:
        return False
    norms = [each for each in _makers([divisor]) if each.name() in _NORMS]
    made_of = set(_makers([numerator]))
    return any(made_of & set(_makers(_operands_of(norm))) for norm in norms)


def _is_of_one(node: Any) -> bool:
    """Whether both operands of a node are forms of one tensor."""
    operands = _operands_of(node)
    if len(operands) != 2:
        return False
    a, b = (set(_makers([each], _SAME)) for each in operands)
    return bool(a & b)


def _hands_on(node: Any) -> bool:
    """Whether a node hands numbers on, or makes products of what ends have made."""
    name = node.name()
    return name in _PASSED | _KERNELS or (name in _PRODUCTS and _made_of_ends(node) != _NONE)


def _sequence_of(node: Any) -> int:
    """Return the place of a node in the order of forward; -1 for leaves."""
    number = -1 if node is None else node._sequence_nr()
    return number if number < _LEAF else -1


def _is_scalar(node: Any) -> bool:
    """Whether a node makes one number, by which a division changes all gradients alike."""
    return all(math.prod(each.shape) == 1 for each in node._input_metadata)


class Slope:
    """What an activation has made codes of its derivative from.

    Args:
        module: The activation.
        source: Its input or result, of which backward computes the derivative.
        modules: Those whose derivatives are to be exact; it may become one.

    Attributes:
        held: What backward uses instead of the codes; None if it uses the codes.
    """

    def __init__(self, module: nn.Module, source: Tensor, modules: weakref.WeakSet[Any]) -> None:
        self._module, self._modules = module, modules
        self.source: Tensor | None = source.detach()
        self.held: Kept | None = None

    def hold_beside(self, tensor: Tensor | None) -> None:
        """Hold only the codes, as for `Compressed`."""
        if tensor is None:
            self.source = None

    def divided(self) -> None:
        """Say that backward divides by the result."""
        self._modules.add(self._module)

    def keep(self, source: Any) -> None:
        """Hold the source instead of the codes."""
        self.held, self.source = source, None


class Saved(NamedTuple):
    """A tensor that was saved.

    Attributes:
        tensor: The tensor.
        packed: A weak reference to the form in which it is held.
        version: Its version when it was saved.
        record: The index of its record.
        bits: Bits of its codes.
        made_by: Sequence number of the node that made it.
        copied: That of the node that made what it is a copy of; -1 if it is none. Operations in
            place save copies that have no other users.
        after: The highest sequence number then; the node that saves it is newer.
    """

    tensor: Tensor
    packed: Callable[[], Any]
    version: int
    record: int
    bits: int
    made_by: int
    copied: int
    after: int


def _is_end(saved: Saved) -> bool:
    """Whether a tensor was made by functions that may end a model, which then holds it."""
    node: Any = saved.tensor.grad_fn
    return node is not None and node.name() not in _SOURCES and _made_of_ends(node) == _ALL


class Recent:
    """The last saved tensors, until it is known that backward does not divide by them.

    They are held beside their codes. A tensor goes when a node has used what was made from it,
    unless that node divides or only hands it on. So of a chain of layers, the last one or two
    remain.

    Args:
        keep: Called for tensors by which backward divides.
        compare: Called for tensors that backward compares with the bounds of intervals.
    """

    def __init__(
        self, keep: Callable[[Saved], None], compare: Callable[[Intervals, Saved], None]
    ) -> None:
        self._keep, self._compare = keep, compare
        self._saved: list[Saved] = []
        self._users: dict[int, list[Any]] = defaultdict(list)  # of what a node has made
        self._seen: set[int] = set()

    def add(self, tensor: Tensor, packed: Any, record: int, bits: int | None) -> None:
        """Add a tensor that was saved."""
        divisions = self._walk(tensor)
        node = tensor.grad_fn
        if node is not None:
            made_by, bits = node._sequence_nr(), bits or _KEPT
            # The node that saves it was made last.
            after, held = torch._C._autograd._get_sequence_nr() - 2, weakref.ref(packed)
            copied = _sequence_of(_operands_of(node)[0]) if node.name() == _COPY else -1
            version = tensor._version
            self._saved.append(Saved(tensor, held, version, record, bits, made_by, copied, after))
            if isinstance(packed, (Compressed, View)):
                packed.hold_beside(tensor)
        self._decide(divisions)

    def look(self, result: Tensor) -> None:
        """Look for nodes that divide in the graph of a result, by which a loss may divide, too."""
        divisions, node = self._walk(result), result.grad_fn
        if node is not None and not _is_scalar(node):
            makers = {each._sequence_nr() for each in _ends_of(node)}
            for saved in self._saved:
                if saved.made_by in makers:  # the loss mostly holds it, too
                    self._keep(saved)
        self._decide(divisions)

    def leave_to_backward(self) -> None:
        """Let backward find out what belongs to the end of a function."""
        found: list[tuple[Any, Any]] = [
            (each.tensor.grad_fn, weakref.ref(each.tensor)) for each in self._saved
        ]
        self._saved = []
        for node, tensor in found:
            if node is not None:  # what somebody holds may be used where no hook sees it
                node.metadata[_LAST] = tensor() is not None

    def close(self) -> None:
        """Hold nothing beside codes."""
        self._leave([])

    def _walk(self, tensor: Tensor) -> list[Any]:
        """Return the nodes of a graph that may divide and were not seen before."""
        # What uses the saved tensors is made later.
        first = min((each.made_by for each in self._saved), default=_sequence_of(tensor.grad_fn))
        left, divisions = [tensor.grad_fn], []
        while left:
            node: Any = left.pop()
            number = _sequence_of(node)
            if number < 0 or number < first or number in self._seen:
                continue
            self._seen.add(number)
            if node.name() in _DIVISORS or compares(node) or _is_cosine(node):
                divisions.append(node)
            for operand in _operands_of(node):
                self._users[_sequence_of(operand)].append(node)
                left.append(operand)
        return divisions

    def _decide(self, divisions: list[Any]) -> None:
        for node in divisions:
            if compares(node):
                self._keep_operands([node], partial(self._compare, intervals_of(node)))
            elif _is_cosine(node) or self._divides(node):
                self._keep_operands([node, *_mark(node)])
        known: dict[int, bool] = {}
        left = [each for each in self._saved if self._may_divide(each, known)]
        first = len(left) - _MOST
        self._leave([each for i, each in enumerate(left) if i >= first or _is_end(each)])

    def _leave(self, saved: list[Saved]) -> None:
        """Hold only some tensors beside their codes."""
        left = {id(each.packed()) for each in saved}
        for each in self._saved:
            packed = each.packed()
            if isinstance(packed, (Compressed, View, Slope)) and id(packed) not in left:
                packed.hold_beside(None)
        self._saved = saved

    def _may_divide(self, saved: Saved, known: dict[int, bool]) -> bool:
        """Whether backward may still divide by a tensor, or by what was made from it."""
        users = self._users.get(saved.made_by, ())
        users = [user for user in users if _sequence_of(user) > saved.after]
        return not users or any(self._is_open(user, known) for user in users)

    def _is_open(self, node: Any, known: dict[int, bool], depth: int = _DEPTH) -> bool:
        """Whether what a node has made may still be divided, or divided by."""
        number = _sequence_of(node)
        if number not in known:
            users = self._users.get(number, ())
            known[number] = not _is_scalar(node) and (
                not users
                or any(
                    depth > 0 and _hands_on(user) and self._is_open(user, known, depth - 1)
                    for user in users
                )
            )
        return known[number]

    def _divides(self, node: Any) -> bool:
        """Whether a node divides by numbers near 0, as far as its operands are here."""
        operands = _Operands(node, list(self._saved))
        try:
            divisor = _DIVISORS[node.name()](operands, lambda: operands.first)
        except LookupError:
            return False
        if divisor is None or (divisor.is_cuda and torch.cuda.is_current_stream_capturing()):
            return False
        return _is_near_0(divisor, operands.bits, node)

    def _keep_operands(self, nodes: list[Any], keep: Callable[[Saved], None] | None = None) -> None:
        for node in nodes:
            makers = {each._sequence_nr() for each, _ in node.next_functions if each is not None}
            for saved in self._saved:
                changed = saved.tensor._version != saved.version
                if not changed and (
                    makers & {saved.made_by, saved.copied} or saved.made_by == node._sequence_nr()
                ):
                    (keep or self._keep)(saved)


class _Operands:
    """What a node has saved, by the names that it gives to its attributes.

    The attributes themselves would decode, or run a checkpointed block again.

    Attributes:
        bits: Bits of the codes of what was asked for last.
    """

    def __init__(self, node: Any, saved: list[Saved]) -> None:
        copies = {each.copied: each for each in saved if each.copied >= 0}
        self._node, self._tensors = node, copies | {each.made_by: each for each in saved}
        self.bits = _KEPT

    @property
    def first(self) -> Tensor:
        """By what it divides if that is one tensor: its result, as far as saved, or operand."""
        has_result = self._node.name() in _BY_RESULT
        has_result &= self._node._sequence_nr() in self._tensors
        return self._saved_result if has_result else self._saved_self

    @property
    def _saved_result(self) -> Tensor:
        return self._of(self._node._sequence_nr())

    _saved_result0 = _saved_result

    @property
    def _saved_self(self) -> Tensor:
        return self._operand(0)

    @property
    def _saved_other(self) -> Tensor:
        return self._operand(1)

    @property
    def _saved_tensor2(self) -> Tensor:
        return self._operand(2)

    @property
    def _saved_p(self) -> Any:
        return self._node._saved_p

    @property
    def _saved_ord(self) -> Any:
        return self._node._saved_ord

    @property
    def _saved_exponent(self) -> Any:
        if self._node.name() == "PowBackward0":
            return self._node._saved_exponent  # a number
        try:
            return self._operand(1)
        except LookupError:  # without gradient: some power may be below 1
            return torch.zeros(1)

    def _operand(self, index: int) -> Tensor:
        made_by = self._node.next_functions[index][0]
        return self._of(-1 if made_by is None else made_by._sequence_nr())

    def _of(self, made_by: int) -> Tensor:
        saved = self._tensors[made_by]
        if saved.tensor._version != saved.version:
            raise LookupError
        self.bits = saved.bits
        return saved.tensor.detach()
