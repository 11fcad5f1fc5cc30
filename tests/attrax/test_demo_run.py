"""The demonstration from training to report, on a handful of its passages."""

from pathlib import Path

import pytest

import attrax
from attrax.demo import recipe, run
from attrax.frontends.data.examples import batches, encode


@pytest.fixture
def small(monkeypatch: pytest.MonkeyPatch) -> None:
    questions = recipe.questions()[:4]
    named = {row["source"] for row in questions}
    rows = recipe.passages()
    passages = [row for row in rows if row["id"] in named] + [r for r in rows if r["id"] not in named][:12]
    vocabulary = recipe.tokenizer()
    monkeypatch.setattr(recipe, "passages", lambda: passages)
    monkeypatch.setattr(recipe, "questions", lambda: questions)
    monkeypatch.setattr(recipe, "tokenizer", lambda: vocabulary)
    monkeypatch.setattr(recipe, "EPOCHS", run.EPOCHS_APART)


@pytest.mark.filterwarnings("ignore")
def test_demo_trains_scores_and_reports(
    small: None, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    out = tmp_path / "demo"
    run.main(out)
    printed = capsys.readouterr().out
    assert "EK-FAC" in printed and "random order" in printed
    page = (out / "report.html").read_text(encoding="utf-8")
    assert recipe.questions()[0]["prompt"] in page
    for name in ("ekfac", "graddot", "tracin"):
        scores = attrax.read_scores(out / f"{name}.parquet")
        assert set(scores.ids) == {row["id"] for row in recipe.passages()}
        assert len(scores.query_ids) == 4
    store = attrax.open_store(out / "run")
    with pytest.raises(ValueError, match="different parameters"):
        attrax.fit_logra(store, projection=run.PROJECTION)
    with pytest.raises(FileExistsError, match="overwrite"):
        run.main(out)


@pytest.mark.filterwarnings("ignore")
def test_scores_of_the_second_capture_equal_live_scores(small: None, tmp_path: Path) -> None:
    tokenizer = recipe.tokenizer()
    model = recipe.model(tokenizer).eval()
    train = encode(recipe.passages(), tokenizer, max_length=96)
    query = encode(recipe.questions(), tokenizer, max_length=96)
    run.record_final(tmp_path / "final", model, train)
    _, body, _, _ = run.score_final(tmp_path / "final", model, query, train.ids)
    sources = [attrax.live(model, batches(side)) for side in (train, query)]
    live = attrax.ekfac(*sources).in_order(train.ids).query(*query.ids)
    error = (body.values - live.values).abs().max() / live.values.abs().max()
    assert float(error) < 1e-4
