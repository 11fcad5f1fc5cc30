"""Scores in forward mode: every example's product with a query in one forward pass, no backward, no gradient at all.

    <grad loss_i, v> = d/de loss_i(parameters + e v) at e = 0

for all examples i of a batch at once (a Jacobian-vector product).  A pass costs one forward, and two for every query:
as much as a live source for one query, more for several, but with no stored activations, and for parameters of every
kind, used in any way: the model is only called.
"""

import contextlib
from collections.abc import Iterable, Iterator, Mapping

import torch
from torch import Tensor, nn
from torch.func import jvp, vmap
from torch.nn.attention import SDPBackend, sdpa_kernel

from attrax.core import Block, Examples, Scores, Source, Target, collect, stored, targeted
from attrax.core.scores import scores
from attrax.core.source import one_fingerprint
from attrax.core.tree import target_scale
from attrax.frontends.model.fingerprints import Fingerprints
from attrax.frontends.model.losses import Loss, causal_lm
from attrax.frontends.model.modes import check_mode
from attrax.frontends.model.parameters import replaced, slots
from attrax.frontends.model.rows import Batch, for_loss, with_ids
from attrax.frontends.model.sharding import named
from attrax.frontends.tape.recompute import slow_attention
from attrax.frontends.tape.tensor_parallel import refuse_parallel


def forward_scores(
    model: nn.Module,
    data: Iterable[Batch],
    query: Source,
    loss: Loss | None = None,
    *,
    target: Target = "sum",
    at_once: int = 1,
    about: Mapping[str, str] | None = None,
) -> Scores:
    """Inner products of train gradients with a few queries, without computing a train gradient.

    Equal to ``graddot(live(model, data, loss), query)`` over the parameters of the query's leaves.  With queries seen
    through `preconditioned`, they are the scores of `influence`.

    Args:
        model: The model, in eval mode, at the parameters of the query gradients; it is not changed.
        data: Train batches, as for `live`.
        query: Query gradients in the parameters' own layout (not projected), plain or preconditioned; they are kept in
            memory, each as large as the parameters that it covers.
        loss: ``(model, batch) -> [B]`` summed loss per example; `causal_lm` by default.
        target: See `graddot`; the train side is "sum" for "as_trained" too.
        at_once: Queries that share a pass by `torch.func.vmap`, at one set of activations each.  With 1, the model is
            called once a query, and need not be a model that vmap can trace.
        about: What the scores are, if not plain products.

    Returns:
        Scores [N, Q]; higher = more helpful.

    Raises:
        ValueError: If sources are empty, projected, or taken at other parameters, or the loss is not one per example.
        RuntimeError: If an operation of the model has no forward mode.

    >>> from attrax.frontends import classification, live
    >>> net = nn.Linear(2, 3).eval()
    >>> data = [{"x": torch.ones(2, 2), "y": torch.tensor([0, 1])}]
    >>> forward_scores(net, data, live(net, data, classification()), classification()).values.shape
    torch.Size([2, 2])
    """
    if at_once < 1:
        raise ValueError(f"forward_scores: at_once: got {at_once}; expected a positive number of queries.")
    model, loss = getattr(model, "_orig_mod", model), loss or causal_lm()
    check_mode(model)
    refuse_parallel(model, "forward_scores")
    queries = collect(targeted(query, target), operation="forward_scores")
    directions = _directions(model, queries)
    marks, rows, values = Fingerprints(model), [], []
    for raw in data:
        batch = with_ids(raw)
        if not batch["example_ids"]:
            continue
        examples = _examples(batch, loss, marks.now())
        one_fingerprint(queries.examples.fingerprint, examples, "forward_scores")
        found = _products(model, loss, for_loss(batch, loss), directions, at_once)
        if found.shape != (len(examples), len(queries.examples)):
            raise ValueError(
                f"forward_scores: the loss returned {list(found.shape[:-1])} for {len(examples)} examples; expected "
                "one summed loss per example, [B]."
            )
        scale = target_scale(examples, target)
        rows.append(examples)
        values.append(found if scale is None else found * scale.to(found).unsqueeze(1))
    if not rows:
        raise ValueError("forward_scores: the train data hold no examples.")
    described = {"method": "graddot", "target": target, "unit": "loss"} if about is None else about
    return scores(torch.cat(values), rows, queries.examples.ids, described)


def _examples(batch: Batch, loss: Loss, mark: str) -> Examples:
    tokens = getattr(loss, "tokens", None)
    ids = tuple(batch["example_ids"])
    weight = torch.ones(len(ids), dtype=torch.float64)
    return Examples(ids, 0, 0, weight, tokens(batch).cpu() if tokens else None, mark)


def _directions(model: nn.Module, queries: Block) -> dict[str, Tensor]:
    """Query gradients [Q, ...] by parameter, in the parameter's dtype and place."""
    own = named(model)
    given = stored(queries.grads)
    unknown = sorted(set(given) - set(own))
    if unknown:
        raise ValueError(
            f"forward_scores: the queries cover {unknown[:3]}, which the model does not have. Use this model's."
        )
    return {name: v.to(own[name]).view(-1, *own[name].shape) for name, v in given.items()}


def _products(
    model: nn.Module, loss: Loss, batch: Batch, directions: Mapping[str, Tensor], at_once: int
) -> Tensor:
    """Derivatives [B, Q] of every example's loss along every direction."""
    own = named(model)
    at = {name: own[name].detach() for name in directions}

    def losses(parameters: dict[str, Tensor]) -> Tensor:
        with replaced(slots(model, {own[n]: p for n, p in parameters.items()})):
            return loss(model, batch)

    def along(direction: dict[str, Tensor]) -> Tensor:
        return jvp(losses, (at,), (direction,))[1]

    Q = next(iter(directions.values())).shape[0]
    found: list[Tensor] = []
    with _forward_mode():
        for start in range(0, Q, at_once):
            some = {name: v[start : start + at_once] for name, v in directions.items()}
            one = {name: v[0] for name, v in some.items()}
            found.append(vmap(along, out_dims=-1)(some) if at_once > 1 else along(one).unsqueeze(-1))
    return torch.cat(found, -1)


@contextlib.contextmanager
def _forward_mode() -> Iterator[None]:
    """No graph, and attention computed by operations that have a forward mode.

    Raises:
        RuntimeError: If another operation has none.
    """
    eager = torch.compiler.set_stance("force_eager")
    try:
        with (
            torch.inference_mode(False),
            torch.no_grad(),
            slow_attention(),
            sdpa_kernel(SDPBackend.MATH),
            eager,
        ):
            yield
    except RuntimeError as error:
        if not any(sign in str(error) for sign in ("forward AD", "forward mode AD", "functorch", "vmap")):
            raise
        raise RuntimeError(
            f"forward_scores: an operation of the model has no forward mode: {str(error).splitlines()[0]} Load the "
            "model with attn_implementation='eager' or 'sdpa', pass at_once=1, or score with graddot on a live source."
        ) from error
