"""Losses: values, counts, sampled labels, padding on either side."""

import math

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from attrax.frontends import causal_lm, classification
from attrax.frontends.model.losses import (
    causal_targets,
    left_padded_positions,
    sample_targets,
    shifted,
    token_losses,
)
from attrax.frontends.model.rows import with_ids

from .models import VOCAB, TinyLM, classes, documents, seeded
from .oracle import unpadded


def test_causal_lm_sums_the_losses_of_predicted_tokens(rng):
    model, batch = seeded(TinyLM), documents(rng, [5, 2, 7])
    logits = model(batch["input_ids"], batch["attention_mask"])
    right = [
        sum(F.cross_entropy(logits[i, t], batch["input_ids"][i, t + 1]).item() for t in range(length - 1))
        for i, length in enumerate([5, 2, 7])
    ]
    assert causal_lm()(model, batch).tolist() == pytest.approx(right)
    assert causal_lm().tokens(batch).tolist() == [4, 1, 6]


def test_labels_that_are_not_the_inputs(rng):
    """Only labeled tokens count: a prompt without labels, a document without any."""
    model, batch = seeded(TinyLM), documents(rng, [5, 4])
    batch["labels"][0, :3], batch["labels"][1] = -100, -100
    losses = causal_lm()(model, batch)
    logits = model(batch["input_ids"], batch["attention_mask"])
    right = F.cross_entropy(logits[0, 2:4], batch["input_ids"][0, 3:5], reduction="sum")
    torch.testing.assert_close(losses, torch.stack([right, torch.zeros_like(right)]))
    assert causal_lm().tokens(batch).tolist() == [2, 0]


def test_a_document_has_one_loss_wherever_it_is_padded(rng):
    model, batch = seeded(TinyLM), documents(rng, [5, 3, 6])
    alone = torch.cat([causal_lm()(model, unpadded(batch, i)) for i in range(3)])
    torch.testing.assert_close(causal_lm()(model, batch), alone)
    moved = {
        k: torch.stack([x.roll(6 - n) for x, n in zip(v, (5, 3, 6), strict=True)]) for k, v in batch.items()
    }
    torch.testing.assert_close(causal_lm()(model, moved), alone)
    assert causal_lm().tokens(moved).tolist() == [4, 2, 5]


def test_positions_are_supplied_only_where_padding_shifts_them(rng):
    model, mask = TinyLM(), torch.tensor([[0, 1, 1], [1, 1, 1]])
    assert left_padded_positions(model, {"attention_mask": mask})["position_ids"].tolist() == [
        [0, 0, 1],
        [0, 1, 2],
    ]
    given = {"attention_mask": mask, "position_ids": mask}
    nothing: list[tuple[nn.Module, dict[str, Tensor]]] = [
        (model, given),
        (model, {"attention_mask": mask.flip(1)}),
        (model, {"attention_mask": mask[:, None]}),
        (model, {}),
        (nn.Linear(2, 2), {"attention_mask": mask.flip(1)}),
    ]
    assert all(left_padded_positions(m, inputs) == {} for m, inputs in nothing)
    with pytest.raises(ValueError, match=r"Linear.forward takes no position_ids.*Pad on the right"):
        left_padded_positions(nn.Linear(2, 2), {"attention_mask": mask})


def test_token_losses_are_computed_in_float32(rng):
    logits = torch.randn(2, 3, 7, generator=rng).bfloat16()
    targets = torch.tensor([[1, -100, 3], [0, 6, 2]])
    losses = token_losses(logits, targets)
    assert losses.dtype == torch.float32 and losses[0, 1] == 0
    right = -logits.double().log_softmax(-1)[1, 2, 2]
    assert losses[1, 2].item() == pytest.approx(right.item(), rel=1e-6)


def test_shifted_predicts_nothing_at_the_end():
    assert shifted(torch.tensor([[1, 2, 3], [4, -100, 6]])).tolist() == [[2, 3, -100], [-100, 6, -100]]


def test_classification_reads_the_keys_it_is_told(rng):
    model, batch = nn.Linear(4, 3).double(), classes(rng)
    right = F.cross_entropy(model(batch["x"]), batch["y"], reduction="none")
    torch.testing.assert_close(classification()(model, batch), right)
    named = classification("image", "label")
    renamed = {"image": batch["x"], "label": batch["y"]}
    torch.testing.assert_close(named(model, renamed), right)
    assert named.tokens(renamed).tolist() == [1, 1, 1, 1]


def test_sampled_labels_follow_the_model(rng):
    logits = torch.randn(1, 1, 5, generator=rng).expand(4000, 1, 5)
    ids = [f"x{i}" for i in range(4000)]
    drawn = sample_targets(logits, torch.zeros(4000, 1, dtype=torch.long), ids, seed=0)
    share = torch.bincount(drawn.flatten(), minlength=5) / 4000
    p = logits[0, 0].softmax(-1)
    assert ((share - p).abs() < 4 * (p * (1 - p) / 4000).sqrt()).all()


def test_sampled_labels_depend_on_seed_example_and_place_only(rng):
    logits = torch.zeros(2, 6, VOCAB)
    targets = torch.tensor([[1, 1, 1, 1, -100, -100], [1, 1, 1, -100, -100, -100]])
    drawn = sample_targets(logits, targets, ["a", "b"], seed=0)
    assert torch.equal(drawn < 0, targets < 0)
    swapped = sample_targets(logits, targets.flip(0), ["b", "a"], seed=0)
    assert torch.equal(swapped.flip(0), drawn)
    longer = sample_targets(
        torch.zeros(1, 9, VOCAB), torch.tensor([[-100] * 3 + [1] * 4 + [-100] * 2]), ["a"], seed=0
    )
    assert longer[0, 3:7].tolist() == drawn[0, :4].tolist()
    others = [sample_targets(logits, targets, ["a", "b"], seed=s) for s in range(1, 9)]
    assert len({tuple(x[0, :4].tolist()) for x in [drawn, *others]}) > 6
    assert drawn[0, :3].tolist() != drawn[1, :3].tolist()


def test_sampled_labels_reach_every_class_and_no_other():
    """The cumulative sums of 50,000 equal probabilities round; the last class is not passed."""
    logits = torch.zeros(64, 1, 50_000)
    drawn = sample_targets(logits, torch.zeros(64, 1, dtype=torch.long), [f"{i}" for i in range(64)], seed=3)
    assert 0 <= int(drawn.min()) < 5_000 and 45_000 < int(drawn.max()) < 50_000
    certain = torch.full((8, 1, 3), -math.inf)
    certain[..., 1] = 0
    drawn = sample_targets(certain, torch.zeros(8, 1, dtype=torch.long), list("abcdefgh"), seed=0)
    assert drawn.unique().tolist() == [1]


def test_a_sampled_loss_keeps_positions_and_counts(rng):
    model, batch = seeded(TinyLM), with_ids(documents(rng, [5, 3]))
    sampled = causal_lm().sampled(4)
    assert sampled.seed == 4 and causal_lm().seed is None
    assert torch.equal(sampled.tokens(batch), causal_lm().tokens(batch))
    assert not torch.equal(sampled(model, batch), causal_lm()(model, batch))
    assert torch.equal(sampled(model, batch), causal_lm().sampled(4)(model, batch))


def rows_of(documents_, owners, weights=None):
    """One row a document, padded on the right, owned by the given examples."""
    width = max(len(d) for d in documents_)
    pad = lambda d, value: F.pad(d, (0, width - len(d)), value=value)  # noqa: E731
    batch = {
        "input_ids": torch.stack([pad(d, 0) for d in documents_]),
        "labels": torch.stack([pad(d, -100) for d in documents_]),
        "attention_mask": torch.stack([pad(torch.ones_like(d), 0) for d in documents_]),
        "example_ids": tuple(f"e{i}" for i in range(max(owners) + 1)),
    }
    owner = torch.tensor(owners)[:, None].expand(-1, width)
    batch["segment_ids"] = owner.masked_fill(batch["attention_mask"] == 0, -1)
    if weights is not None:
        batch["token_weights"] = torch.tensor(weights)[:, None].expand(-1, width)
    return batch


def texts(rng, *lengths):
    return [torch.randint(1, VOCAB, (n,), generator=rng) for n in lengths]


def test_an_example_of_several_rows_has_the_sum_of_their_losses(rng):
    model, docs = seeded(TinyLM), texts(rng, 5, 3, 6)
    alone = torch.cat([causal_lm()(model, {"input_ids": d[None], "labels": d[None]}) for d in docs])
    batch = rows_of(docs, [0, 1, 0])
    torch.testing.assert_close(causal_lm()(model, batch), torch.stack([alone[0] + alone[2], alone[1]]))
    assert causal_lm().tokens(batch).tolist() == [9, 2]


def test_token_weights_are_those_of_the_predicted_token(rng):
    model, docs = seeded(TinyLM), texts(rng, 5, 3)
    alone = torch.cat([causal_lm()(model, {"input_ids": d[None], "labels": d[None]}) for d in docs])
    difference = causal_lm()(model, rows_of(docs, [0, 0], [1, -1]))
    torch.testing.assert_close(difference, (alone[0] - alone[1])[None])
    logits = model(docs[0][None])[0]
    right = 0.5 * F.cross_entropy(logits[1], docs[0][2]) - 2 * F.cross_entropy(logits[3], docs[0][4])
    weights = torch.tensor([[9.0, 0, 0.5, 0, -2]])
    weighed = {"input_ids": docs[0][None], "labels": docs[0][None], "token_weights": weights}
    torch.testing.assert_close(causal_lm()(model, weighed), right[None])


def test_no_token_predicts_across_a_boundary():
    labels = torch.tensor([[1, 2, 3, 4, 5, 6], [7, 8, 9, 1, 2, 3]])
    segments = torch.tensor([[0, 0, 0, 1, 1, -1], [-1, -1, 2, 2, 0, 0]])
    batch = {"labels": labels, "segment_ids": segments, "example_ids": ("a", "b", "c")}
    assert causal_targets(batch).tolist() == [
        [2, 3, -100, 5, -100, -100],
        [-100, -100, 1, -100, 3, -100],
    ]
    assert causal_lm().tokens(batch).tolist() == [3, 1, 1]


def test_an_example_without_tokens_has_no_loss(rng):
    model, docs = seeded(TinyLM), texts(rng, 4)
    batch = rows_of(docs, [1])
    losses = causal_lm()(model, batch)
    assert losses[0] == 0 and losses[1] > 0 and causal_lm().tokens(batch).tolist() == [0, 3]


def test_sampled_labels_do_not_depend_on_who_shares_the_row():
    alone = sample_targets(torch.zeros(2, 5, VOCAB), torch.ones(2, 5, dtype=torch.long), ["a", "b"], seed=0)
    segments = torch.tensor([[1, 1, 0, 0, 0, 1], [0, 0, 1, 1, -1, -1]])
    targets = torch.where(segments >= 0, 1, -100)
    drawn = sample_targets(torch.zeros(2, 6, VOCAB), targets, ["a", "b"], 0, segments)
    assert torch.equal(drawn < 0, targets < 0)
    assert torch.equal(drawn[segments == 0], alone[0]) and torch.equal(drawn[segments == 1], alone[1])


def test_masks_of_four_axes_and_positions_are_passed_as_they_are(rng):
    class Seen(nn.Module):
        def forward(self, input_ids, attention_mask, position_ids):
            self.inputs = (attention_mask, position_ids)
            return torch.zeros(*input_ids.shape, VOCAB)

    model, ids = Seen(), torch.ones(1, 3, dtype=torch.long)
    mask, positions = torch.zeros(1, 1, 3, 3), torch.tensor([[0, 1, 0]])
    batch = {"input_ids": ids, "labels": ids, "attention_mask": mask, "position_ids": positions}
    causal_lm()(model, batch)
    assert model.inputs[0] is mask and model.inputs[1] is positions
