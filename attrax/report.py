"""A report that a person can read: one HTML file with its style inside, which loads nothing from anywhere.

For every question it shows what the model was asked and said, the training passages that did most for and against that
answer, and which of their tokens carry the score; around it, what the numbers mean, how much of the model they cover,
and how often known sources were found.
"""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from importlib import resources
from pathlib import Path
from typing import Any

from attrax.frontends.data.records import needed


@dataclass(frozen=True, slots=True)
class Passage:
    """A training passage as shown for one question.

    Attributes:
        id: Example id.
        score: Its score for the question.
        rank: Its rank among all passages, 1 = most helpful; ties share their average rank.
        text: The passage.
        tokens: The passage once more as (token text, share of the score); empty if unknown.
        source: Whether it is a known source of the answer.
        note: Something to show beside the id.
    """

    id: str
    score: float
    rank: float
    text: str
    tokens: tuple[tuple[str, float], ...] = ()
    source: bool = False
    note: str = ""


@dataclass(frozen=True, slots=True)
class Question:
    """A question with the passages that matter most for its answer.

    Attributes:
        id: Query id.
        prompt: What the model was given; may be empty.
        answer: What it was scored on.
        helpful: Passages with the highest scores, best first.
        harmful: Passages with the lowest scores, lowest first.
        sources: Ids of known sources with their ranks.
    """

    id: str
    prompt: str
    answer: str
    helpful: tuple[Passage, ...]
    harmful: tuple[Passage, ...] = ()
    sources: tuple[tuple[str, float], ...] = ()


@dataclass(frozen=True, slots=True)
class Retrieval:
    """How often a method ranks a question's known source among its best k passages: {k: share of questions}."""

    method: str
    shares: Mapping[int, float]


@dataclass(frozen=True, slots=True)
class Report:
    """Everything on the page.

    Attributes:
        title: Heading.
        about: What the scores are: `Scores.about`.
        questions: Questions, in the order shown.
        passages: Number of training passages that were ranked.
        omitted: Number of questions that were scored but are not shown.
        coverage: Which parameters took part, as text.
        retrieval: Methods to compare, if sources are known.
        facts: Further (name, value) pairs: model, files, versions.
    """

    title: str
    about: Mapping[str, str]
    questions: tuple[Question, ...]
    passages: int
    omitted: int = 0
    coverage: str = ""
    retrieval: tuple[Retrieval, ...] = ()
    facts: tuple[tuple[str, str], ...] = ()


_FAINT = 0.06
_INFLUENCE = (
    "An influence function: the inner product of two gradients, after dividing out how strongly the loss curves in "
    "each direction, as estimated by "
)
_WORDS: Mapping[str, Mapping[str, str]] = {
    "method": {
        "graddot": "The inner product of two gradients: would a small training step on the passage also have lowered "
        "the loss on the answer?",
        "gradcos": "The cosine of the angle between two gradients: as graddot, but a long or surprising passage gains "
        "nothing from its size.",
        "kfac": _INFLUENCE + "K-FAC.",
        "ekfac": _INFLUENCE + "EK-FAC (Grosse et al. 2023).",
        "logra": _INFLUENCE + "a full matrix over randomly projected gradients (LoGRA, Choe et al. 2024).",
        "self_influence": "How strongly a passage acts on its own loss. Large values mark unusual, mislabeled or "
        "memorized passages.",
    },
    "unit": {
        "loss": "Change of the answer's loss (in nats) for each unit of step size along the passage's gradient, to "
        "first order. Compare scores within one question; their absolute size depends on the model.",
        "cosine": "A number between -1 and 1 without a unit.",
        "loss x examples": "Divide by the number of training passages to estimate by how many nats the answer's loss "
        "would rise if the passage were left out.",
    },
    "target": {
        "sum": "Losses are summed over tokens, so a long passage can weigh more than a short one.",
        "mean": "Losses are averaged over the tokens of each passage, so length does not count.",
        "as_trained": "Losses carry the weights that training gave them.",
    },
    "fisher": {
        "empirical": "Curvature was measured with the labels in the data.",
        "sampled": "Curvature was measured with labels drawn from the model itself.",
    },
}
_SENTENCES = {
    "damping": "Added to the curvature, so that directions the data say little about are not blown up. More damping "
    "moves scores towards plain inner products of gradients.",
    "projection": "Gradients were made smaller by a random projection that keeps inner products on average.",
    "sign": "Positive: training more on this passage would have made the answer more likely. Negative: less likely.",
}


def explain(about: Mapping[str, str]) -> list[tuple[str, str, str]]:
    """What a score's description means: (name, value, plain words), what matters most first.

    >>> explain({"unit": "cosine", "method": "gradcos"})[1]
    ('unit', 'cosine', 'A number between -1 and 1 without a unit.')
    """
    known = ["method", "sign", "unit", "damping", "target", "fisher", "projection"]
    names = [name for name in known if name in about] + sorted(set(about) - set(known))
    plain = {name: "" if about[name] == "none" else _SENTENCES.get(name, "") for name in names}
    return [(name, about[name], _WORDS.get(name, {}).get(about[name], plain[name])) for name in names]


def render(report: Report) -> str:
    """The report as one HTML page.

    Args:
        report: What to show.  All text is escaped.

    Returns:
        The page.

    Raises:
        ImportError: If jinja2 is not installed.
    """
    jinja2 = needed("jinja2", "report", "the HTML report")
    environment = jinja2.Environment(
        autoescape=True, undefined=jinja2.StrictUndefined, trim_blocks=True, lstrip_blocks=True
    )
    environment.filters |= {"signed": signed, "share": lambda x: f"{100 * x:.0f}%", "place": place}
    source = resources.files("attrax").joinpath("report.html.j2").read_text(encoding="utf-8")
    return environment.from_string(source).render(
        report=report,
        explained=explain(report.about),
        cutoffs=sorted({k for row in report.retrieval for k in row.shares}),
        views=[_view(question) for question in report.questions],
    )


def write_report(report: Report, path: str | Path, *, overwrite: bool = False) -> Path:
    """Write the report to an HTML file.

    Args:
        report: What to show.
        path: The file.
        overwrite: Replace an existing file.

    Returns:
        The path.

    Raises:
        FileExistsError: If the file exists and `overwrite` is not set.
        ImportError: If jinja2 is not installed.
    """
    path = Path(path)
    if path.exists() and not overwrite:
        raise FileExistsError(f"write_report: {path} exists. Choose another path, or pass overwrite=True.")
    page = render(report)
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(page, encoding="utf-8")
    return path


def signed(score: float) -> str:
    """A score with its sign and three significant digits.

    >>> signed(0.012345), signed(-7.0), signed(3834.0), signed(1.5e-9)
    ('+0.0123', '−7', '+3,830', '+1.5e-09')
    """
    short = float(f"{score:.3g}")
    return (f"{short:+,.6g}" if 1e-3 <= abs(short) < 1e6 else f"{short:+.3g}").replace("-", "−", short < 0)


def place(rank: float) -> str:
    """A rank without needless decimals; shared ranks keep theirs.

    >>> place(3.0), place(2.5)
    ('3', '2.5')
    """
    return f"{rank:g}"


def _view(question: Question) -> dict[str, Any]:
    """A question with the lengths of its bars and the strengths of its token colors, one scale for all its passages."""
    passages = [*question.helpful, *question.harmful]
    longest = max((abs(p.score) for p in passages if math.isfinite(p.score)), default=0.0)
    strong = _strong([score for p in passages for _, score in p.tokens])

    def shown(passage: Passage) -> dict[str, Any]:
        return {
            "passage": passage,
            "bar": round(100 * abs(passage.score) / longest)
            if longest and math.isfinite(passage.score)
            else 0,
            "tokens": [(text, score, _ratio(score, strong)) for text, score in passage.tokens],
        }

    return {
        "question": question,
        "helpful": [shown(p) for p in question.helpful],
        "harmful": [shown(p) for p in question.harmful],
    }


def _ratio(score: float, top: float) -> float:
    """|score| / top, at most 1, in steps of 1/50; 0 for what would hardly be seen."""
    ratio = min(1.0, round(50 * abs(score) / top) / 50) if top > 0 and math.isfinite(score) else 0.0
    return ratio if ratio >= _FAINT else 0.0


def _strong(scores: Sequence[float]) -> float:
    """The strength that gets full color: the 98th percentile of |score|, so that one token does not fade the rest."""
    sizes = sorted(abs(score) for score in scores if math.isfinite(score))
    return sizes[min(len(sizes) - 1, int(0.98 * len(sizes)))] if sizes else 0.0
