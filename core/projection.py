"""Random projections of gradients: on both factors, elementwise on the factors, or dense on the flattened gradient.

    two           P_g G P_a^T = sum_t (P_g g_t)(P_a a_t)^T       k x k numbers a layer; rows stay factored while shorter
    elementwise   sqrt(k) sum_t (P_g g_t) * (P_a a_t)            k numbers a layer; rows stay
    dense         P vec(G)                                       k numbers a leaf

E[P^T P] = I for every kind of P, so inner products stay unbiased whatever the layer's shape, which sums over layers
need.  A side no wider than k is left exact (not elementwise, which needs both).  Layers that share an input share P_a
(their errors are then correlated, their estimates unbiased).  Vector parameters are kept exact unless dense.

    kind         entries                                     Var<Px, Py>, V = |x|^2 |y|^2 + <x,y>^2      cost, dense
    rademacher   +-1/sqrt(k)                                 (V - 2 sum x^2 y^2) / k                     2 d k
    gaussian     N(0, 1/k)                                   V / k                                       2 d k
    sjlt         s nonzeros +-1/sqrt(s) a column             (V - 2 sum x^2 y^2) / k                     2 d s
    srht         Hadamard rows, signs                        (V - 2 sum x^2 y^2) / k (d - k) / (d - 1)   d log d

References: Choe et al. 2024 (LoGRA, arXiv:2405.13954), section 3; for the kinds see `attrax.core.sketch`.
"""

from dataclasses import dataclass
from typing import Literal, TypeAlias

from jaxtyping import Float
from torch import Tensor

from attrax.core.random import random_rows, stream_key
from attrax.core.sketch import hadamard_rows, sparse_targets

MapKind: TypeAlias = Literal["rademacher", "gaussian", "sjlt", "srht"]
SidesKind: TypeAlias = Literal["two", "elementwise", "dense"]
KINDS: dict[str, tuple[str, ...]] = {
    "two": ("rademacher", "gaussian", "sjlt", "srht"),
    "elementwise": ("rademacher", "gaussian"),
    "dense": ("rademacher", "gaussian", "sjlt", "srht"),
}


@dataclass(frozen=True, slots=True)
class Projection:
    """What to project to; a value, so that two sides can be checked to have used the same one.

    Attributes:
        dim: k, the projected width of each side (two, elementwise) or of the whole leaf (dense).
        kind: Distribution of the matrices; see the module docstring.
        sides: "two", "elementwise" or "dense".
        seed: Seed of every matrix; each is drawn from a stream named by (seed, parameter, side, shape, kind).
        nonzeros: s, nonzeros a column of "sjlt".
    """

    dim: int
    kind: MapKind = "rademacher"
    sides: SidesKind = "two"
    seed: int = 0
    nonzeros: int = 1

    @property
    def basis(self) -> str:
        """Label carried by projected leaves."""
        return f"{self.sides}-{self.named}-{self.dim}-seed{self.seed}"

    @property
    def named(self) -> str:
        """The kind with its parameters."""
        return f"sjlt{self.nonzeros}" if self.kind == "sjlt" else self.kind


def check_projection(spec: Projection) -> None:
    """Refuse a specification without meaning.

    Raises:
        ValueError: If `dim` is not positive (or no multiple of `nonzeros`), or sides and kind do not exist together.
    """
    if spec.dim < 1 or spec.sides not in KINDS:
        raise ValueError(f"project: got {spec}; expected dim >= 1 and sides 'two', 'elementwise' or 'dense'.")
    if spec.kind not in KINDS[spec.sides]:
        raise ValueError(
            f"projection kind: got {spec.kind!r}; expected one of {list(KINDS[spec.sides])} "
            f"with sides={spec.sides!r}."
        )
    if spec.kind == "sjlt" and (spec.nonzeros < 1 or spec.dim % spec.nonzeros):
        raise ValueError(f"project: got {spec}; expected a dim that is a multiple of nonzeros >= 1.")


def projection_key(spec: Projection, name: str, side: str, width: int) -> int:
    """Key of the stream that a matrix is drawn from."""
    return stream_key(spec.seed, name, side, width, spec.dim, spec.named)


def projection_matrix(
    spec: Projection, name: str, side: str, width: int, rows: slice | None = None
) -> Float[Tensor, "width k"] | None:
    """Transposed projection of one side, ``P^T [width, k]`` (or some of its rows); None where the side is kept exact.

    Args:
        spec: The projection.
        name: The leaf's name (sides "a" and "dense") or the part's weight (side "g").
        side: "a", "g" or "dense".
        width: Width of what is projected.
        rows: Range of rows.

    >>> projection_matrix(Projection(4), "w", "a", 10).shape, projection_matrix(Projection(4), "w", "a", 3)
    (torch.Size([10, 4]), None)
    """
    if width <= spec.dim and side != "dense" and spec.sides != "elementwise":
        return None
    key, rows = projection_key(spec, name, side, width), rows or slice(0, width)
    if spec.kind == "srht":
        return hadamard_rows(key, rows, width, spec.dim)
    if spec.kind == "sjlt":
        target, sign = sparse_targets(key, rows, spec.dim, spec.nonzeros)
        matrix = sign.new_zeros(len(target), spec.dim)
        return matrix.scatter(1, target, sign * spec.nonzeros**-0.5)
    return random_rows(key, spec.kind, rows, spec.dim) * spec.dim**-0.5
