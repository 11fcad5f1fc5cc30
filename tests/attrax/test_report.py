"""The report: everything asked for is on it, everything is escaped, and nothing is loaded from elsewhere."""

import re
import sys
from dataclasses import replace
from html.parser import HTMLParser

import pytest

from attrax.report import Passage, Question, Report, Retrieval, explain, render, signed, write_report

EVIL = '<script>alert("x")</script> & <b>'
VOID = {"meta", "br", "img", "link", "input", "hr"}
ABOUT = {
    "method": "ekfac",
    "sign": "higher = more helpful",
    "unit": "loss x examples",
    "damping": "0.1 x mean eigenvalue of each layer",
    "target": "sum",
    "fisher": "empirical",
    "projection": "none",
}
GOOD = Passage(
    "p1",
    3.5,
    1.0,
    "Rope is made.",
    (("Rope", 3.0), (" is", -0.4), (" made", 0.9), (".", 0.001)),
    True,
    "towns",
)
BAD = Passage("p2", -1.25, 7.5, "No tokens here.")
QUESTION = Question("q1", "They sell", " rope", (GOOD,), (BAD,), (("p1", 1.0),))
REPORT = Report(
    "A title",
    ABOUT,
    (QUESTION,),
    10,
    2,
    "captured 97.0% of trainable parameters",
    (Retrieval("ekfac", {1: 0.5, 5: 0.75, 10: 1.0}), Retrieval("random order", {1: 0.1, 5: 0.5, 10: 1.0})),
    (("model", "tiny"),),
)


class Page(HTMLParser):
    """Text, tags and attributes of a page; tags must nest."""

    def __init__(self, page):
        super().__init__()
        self.open, self.tags, self.text = [], [], ""
        self.feed(page)
        assert not self.open

    def handle_starttag(self, tag, attrs):
        self.tags.append((tag, dict(attrs)))
        if tag not in VOID:
            self.open.append(tag)

    def handle_endtag(self, tag):
        assert self.open.pop() == tag

    def handle_data(self, data):
        self.text += data if self.open and self.open[-1] not in ("script", "style") else ""

    def words(self):
        return " ".join(self.text.split())


@pytest.mark.parametrize(
    "expected",
    [
        "A title",
        "10 passages were ranked for 3 questions with ekfac; 1 is shown here",
        "They sell rope",
        "Rope is made.",
        "No tokens here.",
        "+3.5 rank 1 p1 towns known source",
        "−1.25 rank 7.5 p2",
        "The known source p1 is ranked 1 of 10.",
        "methodtop 1top 5top 10 ekfac50%75%100% random order10%50%100%",
        "Divide by the number of training passages",
        "Added to the curvature",
        "labels in the data",
        "captured 97.0% of trainable parameters",
        "modeltiny",
    ],
)
def test_everything_is_on_the_page(expected):
    assert expected in Page(render(REPORT)).words()


def test_tokens_are_colored_by_sign_and_strength():
    spans = [a for tag, a in Page(render(REPORT)).tags if tag == "span" and "title" in a]
    assert [(s.get("class"), s["title"]) for s in spans] == [
        ("p", "+3"),
        ("n", "−0.4"),
        ("p", "+0.9"),
        (None, "+0.001"),
    ]
    strengths = [float(s["style"].removeprefix("--a:")) for s in spans if "style" in s]
    assert strengths == sorted(strengths, reverse=True)[:1] + strengths[1:] and strengths[0] == 1
    assert 0 < strengths[1] < strengths[2] < 1


def test_all_text_is_escaped():
    passage = Passage(EVIL, 1.0, 1.0, EVIL, ((EVIL, 1.0),), True, EVIL)
    plain = replace(passage, tokens=())
    question = Question(EVIL, EVIL, EVIL, (passage,), (plain,), ((EVIL, 1.0),))
    report = Report(
        EVIL,
        {"method": EVIL, EVIL: EVIL},
        (question, question),
        1,
        0,
        EVIL,
        (Retrieval(EVIL, {1: 0.0}),),
        ((EVIL, EVIL),),
    )
    made = render(report)
    page = Page(made)
    assert made.count("<script>") == 1 and "alert" not in re.findall(r"<script>(.*?)</script>", made, re.S)[0]
    assert page.words().count(EVIL) >= 12
    assert not [
        1 for tag, a in page.tags if any("alert" in (v or "") for k, v in a.items() if k != "aria-label")
    ]


def test_nothing_is_loaded_from_elsewhere():
    made = render(REPORT)
    page = Page(made)
    for tag, attributes in page.tags:
        assert tag not in ("link", "img", "iframe", "object", "embed", "base")
        assert "src" not in attributes and attributes.get("href", "#").startswith("#")
    assert not re.search(r"https?://|url\(|@import", made)
    policy = next(a["content"] for tag, a in page.tags if a.get("http-equiv") == "Content-Security-Policy")
    assert policy.startswith("default-src 'none'")


def test_page_is_accessible_and_for_phones():
    made = render(replace(REPORT, questions=(QUESTION,) * 5))
    page = Page(made)
    ids = [a["id"] for _, a in page.tags if "id" in a]
    assert len(ids) == len(set(ids)) and ("html", {"lang": "en"}) in page.tags
    assert {a["href"][1:] for tag, a in page.tags if tag == "a"} <= set(ids)
    assert {a["aria-labelledby"] for _, a in page.tags if "aria-labelledby" in a} <= set(ids)
    assert any(a.get("name") == "viewport" for tag, a in page.tags if tag == "meta")
    assert "@media print" in made and "prefers-color-scheme: dark" in made
    assert [("open" in a) for tag, a in page.tags if tag == "details"] == [True, True, True, False, False]


def test_bare_and_extreme_reports():
    bare = Report("t", {}, (Question("q", "", "x", ()),), 0)
    assert "Which parameters" not in Page(render(bare)).words()
    odd = [Passage("i", float(x), 1.0, "x", (("x", float(x)),)) for x in ("inf", "nan", "0")]
    Page(render(Report("t", ABOUT, (Question("q", "", "x", tuple(odd)),), 3)))


def test_self_influence_has_its_own_words():
    text = Page(render(replace(REPORT, about={"method": "self_influence"}, retrieval=()))).words()
    assert "act most strongly on themselves" in text and "Most helpful" not in text


@pytest.mark.parametrize("method", ["graddot", "gradcos", "kfac", "ekfac", "logra", "self_influence"])
def test_every_method_is_explained(method):
    assert all(words for _, _, words in explain({"method": method, "target": "mean", "unit": "loss"}))


def test_unknown_entries_are_shown_as_they_are():
    assert explain({"zeta": "7", "unit": "furlongs"}) == [("unit", "furlongs", ""), ("zeta", "7", "")]


def test_numbers_are_short():
    assert [signed(x) for x in (0.0, 999999.0, 1e6, -0.00012345)] == ["+0", "+1e+06", "+1e+06", "−0.000123"]


def test_written_once(tmp_path):
    path = write_report(REPORT, tmp_path / "deep" / "r.html")
    assert path.read_text(encoding="utf-8") == render(REPORT)
    with pytest.raises(FileExistsError, match="overwrite=True"):
        write_report(REPORT, path)
    write_report(REPORT, path, overwrite=True)


def test_missing_jinja_names_the_extra(monkeypatch):
    monkeypatch.setitem(sys.modules, "jinja2", None)
    with pytest.raises(ImportError, match=r"pip install 'attrax\[report\]'"):
        render(REPORT)
