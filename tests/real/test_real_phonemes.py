"""g2p-en: the package's own code, the rate of wrong phonemes, and all executors."""

import sys
import types
import warnings

import numpy as np
import pytest
import torch
from executors import check_executors
from real_common import PRESETS, calls_of_grus, gru_decibels, quantized
from real_phonemes import LETTERS, PHONEMES, Phonemes

LEAST = {"int8": (29, 30), "int8_wide": (37, 37), "w8a16": (43, 40), "int16": (72, 72)}


@pytest.fixture(scope="module")
def phonemes(published):
    return published(Phonemes)


@pytest.fixture(scope="module")
def calls(phonemes):
    return calls_of_grus(phonemes.model, phonemes.test)


@pytest.fixture(scope="module")
def models(phonemes):
    return {name: quantized(phonemes, config) for name, config in PRESETS.items()}


@pytest.fixture
def package(phonemes, monkeypatch):
    """The class of the package, without the parts that need corpora of nltk and word lists."""
    nltk = types.ModuleType("nltk")
    nltk.data, nltk.pos_tag = types.SimpleNamespace(find=lambda name: name), None
    corpus, tokenize = types.ModuleType("nltk.corpus"), types.ModuleType("nltk.tokenize")
    corpus.cmudict = None
    tokenize.TweetTokenizer = lambda: types.SimpleNamespace(tokenize=str.split)
    inflect = types.ModuleType("inflect")
    inflect.engine = lambda: None
    for module in (nltk, corpus, tokenize, inflect):
        monkeypatch.setitem(sys.modules, module.__name__, module)
    nltk.corpus, nltk.tokenize = corpus, tokenize
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # of escapes in strings
        from g2p_en.g2p import G2p
    return G2p


def test_float_is_the_code_of_the_package(phonemes, package):
    spell = object.__new__(package)
    spell.g2idx = {each: i for i, each in enumerate(LETTERS)}
    spell.idx2p = dict(enumerate(PHONEMES))
    spell.load_variables()
    words = phonemes.test[0][0][:200]
    assert [spell.predict(word) for word in words] == phonemes.own[:200]
    x = spell.encode("quantization")
    states = spell.gru(
        x, x.shape[1], spell.enc_w_ih, spell.enc_w_hh, spell.enc_b_ih, spell.enc_b_hh
    )
    with torch.no_grad():
        found, _ = phonemes.model.encoder(torch.from_numpy(x).transpose(0, 1))
    assert np.abs(found.transpose(0, 1).numpy() - states).max() < 1e-5


def test_wrong_phonemes(phonemes, models):
    own = phonemes.figures(phonemes.model)["wrong phonemes, %"]
    assert 9 < own < 11.5
    with torch.no_grad():
        found = {name: phonemes.figures(model) for name, model in models.items()}
    for name, (more, other) in {
        "int8": (0.6, 8),
        "int8_wide": (0.4, 3.5),
        "w8a16": (0.4, 2.5),
        "int16": (0.2, 0.5),
    }.items():
        assert found[name]["wrong phonemes, %"] < own + more, name
        assert found[name]["other than float, % of words"] < other, name


@pytest.mark.parametrize("preset", PRESETS)
def test_states_of_words_that_calibration_did_not_see(preset, models, calls):
    found = gru_decibels(models[preset], calls)
    encoder, decoder = LEAST[preset]
    assert found["encoder"] > encoder
    assert found["decoder"] > decoder


@pytest.mark.parametrize("preset", ["int8", "w8a16"])
def test_all_executors_are_equal(preset, models, calls, library, tmp_path):
    for name, own in calls.items():
        for call in own[:2]:
            check_executors(models[preset].get_submodule(name), call, library, tmp_path)
