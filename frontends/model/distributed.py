"""Work shared by the processes of torch.distributed: sums over them, layers dealt out to them, scores gathered.

Everything that processes exchange on behalf of attrax is in this file and in `attrax.frontends.model.fingerprints`.
All processes of a job must reach these points, in the same order:

    capture, live    of a model whose parameters are spread over processes (FSDP1, FSDP2), and of no other one, at every
                     outermost call of it with gradients on: is the model to be asked where examples lie (2 numbers:
                     `least`), and the fingerprint (2 numbers a tensor).  Under FSDP such a call waits for the other
                     processes anyway.  Nothing is exchanged at optimizer steps, on entering or leaving; but all
                     processes enter, pause and leave a capture around the same calls.
    live             of such a model: does any process have a batch left (`in_step`), at every batch.
    fits             with ``ranks=processes()``: once after each pass over the data.
    gather_scores    once; sum_scores twice.

With ``capture(verify=True)`` processes that train together also exchange what they found, until all parameters are
checked, at the end of at most eight backwards that average gradients: of replicated models (DistributedDataParallel)
errors, of sharded ones means of what was captured as well.

Layers that are cut over processes (tensor parallel) add exchanges over these: for every call of such a layer in
backward, where leaves are to be whole (`attrax.frontends.tape.tensor_parallel`), and with ``capture(verify=True)`` the
norms of what they found in the first backward.

Errors that one process finds in what was exchanged are raised by all of them.  If one fails on its own or dies, the
others get torch's error at their next exchange: at once with gloo, after the process group's timeout with NCCL.
"""

from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, replace
from typing import Any, TypeVar

import torch
import torch.distributed as dist
from torch import Tensor

from attrax.core import Scores
from attrax.core.pytree import tree_map
from attrax.core.ranks import ALONE, Ranks
from attrax.core.scores import interleaved

S = TypeVar("S")
T = TypeVar("T")


def processes(group: dist.ProcessGroup | None = None) -> Ranks:
    """The processes of this job, for methods that take ``ranks=``; one process if torch.distributed is not in use.

    Args:
        group: Those that hold different examples, if not all of them do.
    """
    several = dist.is_available() and dist.is_initialized() and dist.get_world_size(group) > 1
    return Processes(group) if several else ALONE


def gather_scores(scores: Scores, group: dist.ProcessGroup | None = None) -> Scores:
    """The scores of all processes' examples, in the order of the data, each example once; the same on all of them.

    Args:
        scores: Scores of this process's share, rows[rank::ranks] of the data, against the same queries everywhere.
            For shares of another kind, `Scores.in_order` sorts the result.
        group: Those that hold different examples, if not all of them do.

    Returns:
        The scores, on the host.  A row whose (id, step) another process holds as well is there once.

    Raises:
        ValueError: If queries differ.
    """
    return interleaved(processes(group).listed(scores))


def sum_scores(scores: Scores, group: dist.ProcessGroup | None = None) -> Scores:
    """The scores of processes that hold shards of the same examples' gradients, added up; the same on all of them.

    Inner products of shards are summands of those of whole gradients; cosines, and products under a curvature that was
    fitted to shards, are not.

    Args:
        scores: Scores from gradients taken with ``tensor_parallel="shards"``, of the same examples in all processes.
        group: Those that share the model's layers, if not all processes do.

    Returns:
        The scores, on the host.

    Raises:
        ValueError: If processes hold scores of different examples or queries.
    """
    ranks = processes(group)
    held = ranks.listed((scores.ids, scores.query_ids, scores.steps, scores.micros, dict(scores.about)))
    if any(other[:-1] != held[0][:-1] for other in held):
        raise ValueError(
            "sum_scores: processes hold scores of different examples or queries; expected shards of the same ones. "
            "Scores of different examples are put together by gather_scores."
        )
    return replace(scores, values=ranks.total({"": scores.values})[""].detach().cpu(), about=held[0][-1])


def deal(costs: Mapping[str, float], ranks: int) -> dict[str, int]:
    """Which process gets which task: the dearest first, to the one that has least to do.

    >>> deal({"a": 3.0, "b": 2.0, "c": 2.0}, 2)
    {'a': 0, 'b': 1, 'c': 1}
    """
    load = [0.0] * ranks
    owner: dict[str, int] = {}
    for name in sorted(costs, key=lambda n: (-costs[n], n)):
        owner[name] = min(range(ranks), key=lambda r: load[r])
        load[owner[name]] += costs[name]
    return owner


@dataclass(frozen=True, eq=False)
class Processes:
    """Processes of torch.distributed as `attrax.core.ranks.Ranks`; made by `processes`."""

    group: dist.ProcessGroup | None = None

    def listed(self, value: T) -> list[T]:
        """See `Ranks.listed`; tensors arrive on the host."""
        found: list[Any] = [None] * dist.get_world_size(self.group)
        with _answering():
            dist.all_gather_object(found, _on_host(value), self.group)
        return found

    def total(self, states: Mapping[str, S]) -> dict[str, S]:
        """See `Ranks.total`.

        Raises:
            ValueError: If processes hold states of different shapes under one name.
        """
        device = exchange_device(self.group)
        shares = self.listed(_tensors(_outline, dict(states)))
        outlines = {name: outline for share in reversed(shares) for name, outline in share.items()}
        wrong = [n for share in shares for n, outline in share.items() if repr(outline) != repr(outlines[n])]
        if wrong:
            raise ValueError(
                f"total: layer '{wrong[0]}': processes hold statistics of different shapes. Fit the same model, scope "
                "and projection everywhere."
            )

        def add_up(x: Tensor) -> Tensor:
            sum_of_all = x.detach().to(device, copy=True).contiguous()
            with _answering():
                dist.all_reduce(sum_of_all, group=self.group)
            return sum_of_all.to(x.device)

        zeros = {
            n: _tensors(lambda x: torch.zeros_like(x, device=device), outlines[n]) for n in sorted(outlines)
        }
        return {n: _tensors(add_up, states.get(n, zero)) for n, zero in zeros.items()}

    def dealt(
        self, function: Callable[[S], T], tasks: Mapping[str, S], cost: Callable[[S], float]
    ) -> dict[str, T]:
        """See `Ranks.dealt`; an error of one process is raised by all."""
        owner = deal({name: cost(task) for name, task in tasks.items()}, dist.get_world_size(self.group))
        rank, device = dist.get_rank(self.group), exchange_device(self.group)
        made: dict[str, T] = {}
        failed: Exception | None = None
        try:
            made = {name: function(task) for name, task in tasks.items() if owner[name] == rank}
        except Exception as error:
            failed = error
        shares = self.listed((failed, _tensors(_outline, made)))
        for error, _ in shares:
            if error is not None:
                raise error
        found: dict[str, T] = {}
        for name in tasks:
            source = owner[name] if self.group is None else dist.get_global_rank(self.group, owner[name])

            def send(x: Tensor, source: int = source) -> Tensor:
                sent = torch.empty_like(x, device=device) if x.is_meta else x.detach().to(device)
                sent = sent.contiguous()
                with _answering():
                    dist.broadcast(sent, source, group=self.group)
                return sent

            found[name] = _tensors(send, made.get(name, shares[owner[name]][1].get(name)))
        return found


@contextmanager
def _answering() -> Iterator[None]:
    """Say what it means when an exchange between processes fails.

    Raises:
        RuntimeError: If one does not answer.
    """
    try:
        yield
    except RuntimeError as error:
        raise RuntimeError(
            f"process {dist.get_rank()} of {dist.get_world_size()}: another one has ended or does not answer, and with "
            f"it its share of the work ({str(error).splitlines()[0]}). See what the others have printed last, and "
            "start all of them again; stores keep the shards that were finished."
        ) from error


def _tensors(function: Callable[[Tensor], Any], tree: Any) -> Any:
    """A value with a function of each of its tensors in their place."""
    return tree_map(lambda x: function(x) if isinstance(x, Tensor) else x, tree)


def _on_host(value: Any) -> Any:
    if isinstance(value, Scores):
        return replace(value, values=value.values.detach().cpu())
    return _tensors(lambda x: x if x.is_meta else x.detach().cpu(), value)


def _outline(x: Tensor) -> Tensor:
    """A tensor without values."""
    return torch.empty(x.shape, dtype=x.dtype, device="meta")


def least(*values: int) -> list[int]:
    """The smallest of all processes' values, of each of several."""
    held = torch.tensor(values, device=exchange_device())
    dist.all_reduce(held, dist.ReduceOp.MIN)
    return held.tolist()


def in_step(batches: Iterable[T]) -> Iterator[tuple[T, bool]]:
    """The batches of this process; while others have more, its last one again, marked False.

    Raises:
        ValueError: If a process has none at all.
    """
    coming = iter(batches)
    batch = next(coming, None)
    if least(int(batch is not None)) == [0]:
        raise ValueError(
            "live: a process has no batch, but its share of the parameters is needed. Deal it one."
        )
    again, mine = batch, True
    while least(int(not mine)) == [0]:
        assert again is not None
        yield again, mine
        batch = next(coming, None) if mine else None
        again, mine = (again, False) if batch is None else (batch, True)


def exchange_device(group: dist.ProcessGroup | None = None) -> torch.device:
    """Where tensors have to be for the processes to exchange them."""
    on_device = dist.get_backend(group) == "nccl"
    return torch.device("cuda", torch.cuda.current_device()) if on_device else torch.device("cpu")
