# SPDX-License-Identifier: Apache-2.0
"""Scores by names: no score in the place of another."""

from pathlib import Path

from nemo2.llm.evaluation.figures import names_of, of_texts
from nemo2.llm.evaluation.perplexity import Perplexity


def test_names_are_as_long_as_it_takes_to_tell_them_apart():
    assert names_of([Path("/runs/a/checkpoints/step=2"), Path("/runs/b/checkpoints/step=4")]) == ["step=2", "step=4"]
    assert names_of([Path("/runs/a/last"), Path("/runs/b/last")]) == ["a/last", "b/last"]
    assert len(set(names_of([Path("/runs/a"), Path("/runs/a")]))) == 2


def test_files_of_one_name_have_scores_of_their_own():
    texts = {
        f"/data/{lang}/test.txt": Perplexity(nats=nats, num_tokens=2, num_bytes=8)
        for lang, nats in (("de", 4.0), ("fr", 6.0))
    }
    scores = of_texts(texts)
    assert (scores["evaluation/de/test.txt/loss"], scores["evaluation/fr/test.txt/loss"]) == (2.0, 3.0)
    [only] = {name for name in of_texts({"/data/de/test.txt": texts["/data/de/test.txt"]}) if name.endswith("loss")}
    assert only == "evaluation/test.txt/loss"
