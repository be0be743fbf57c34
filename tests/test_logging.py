"""What the loggers "quant_gru" and "actnn" say, and that they are silent unless asked."""

import logging
import subprocess
import sys

import pytest
import torch
from torch import nn

import actnn
from quant_gru import FrozenQuantGRU, QuantGRU, calibrate_model, convert_model


@pytest.fixture
def said(caplog):
    """Return the messages of a module at a level."""

    def found(module, level):
        return [
            record.getMessage()
            for record in caplog.records
            if record.name == module and record.levelno == level
        ]

    with caplog.at_level(logging.DEBUG, "quant_gru"), caplog.at_level(logging.DEBUG, "actnn"):
        yield found


def calibrated():
    torch.manual_seed(0)
    model = convert_model(nn.Sequential(nn.GRU(3, 5)), "int8_wide").eval()
    return calibrate_model(model, [torch.randn(9, 2, 3), torch.randn(9, 2, 3)])[0]


def test_nothing_is_printed_without_a_handler():
    script = (
        "import logging, quant_gru, actnn\n"
        "for name in ('quant_gru', 'actnn'):\n"
        "    logging.getLogger(name + '.anything').warning('said')\n"
    )
    ran = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, check=True)
    assert ran.stdout + ran.stderr == ""


def test_calibration_says_what_it_observes_and_chooses(said):
    calibrated()
    debug, info = logging.DEBUG, logging.INFO
    assert said("quant_gru.calibration.batches", debug) == [
        "calibrating: batch 1 of 2",
        "calibrating: batch 2 of 2",
    ]
    assert said("quant_gru.whole_models.calibrate", info) == ["2 batches observed by '0'"]
    (made,) = said("quant_gru.modules.quantization_state", info)
    assert made.startswith("made scales of 1 cells by histogram in ")
    (choice,) = said("quant_gru.calibration.guard", debug)
    assert choice.startswith("set ")
    assert " sets of scales: squared error of the states " in choice


def test_a_plan_says_once_which_executor_it_takes(said):
    gru = calibrated()
    module = "quant_gru.kernels.cpu.executor"
    before = len(said(module, logging.DEBUG))
    with torch.no_grad():
        for _ in range(5):
            gru(torch.randn(4, 2, 3))
    (line,) = said(module, logging.DEBUG)[before:]
    assert line.startswith("plan of 1 cells on the CPU: ")
    assert line.endswith(", whole calls")


def test_the_reference_executor_is_said_with_its_reason(said, monkeypatch):
    gru = calibrated()
    monkeypatch.setenv("QUANT_GRU_CPU", "reference")
    with torch.no_grad():
        gru(torch.randn(4, 2, 3))
    line = said("quant_gru.kernels.cpu.executor", logging.DEBUG)[-1]
    assert line == "plan on the CPU: the reference executor, because of QUANT_GRU_CPU"


def test_files_are_said_with_the_version_of_their_format(said, tmp_path):
    gru = calibrated()
    frozen, params = str(tmp_path / "gru.safetensors"), str(tmp_path / "gru.json")
    gru.freeze().save(frozen)
    FrozenQuantGRU.load(frozen)
    gru.export_quant_params(params)
    QuantGRU(3, 5).load_quant_params(params)
    assert said("quant_gru.interchange.frozen_file", logging.INFO) == [
        f"wrote a frozen GRU, version 2 of the format (file {frozen!r})",
        f"read a frozen GRU, version 2 of the format (file {frozen!r})",
    ]
    assert said("quant_gru.parameters.document", logging.INFO) == [
        f"wrote parameters, version 2 of their format (file {params!r})",
        f"read parameters, version 2 of their format (file {params!r})",
    ]


def test_fit_says_its_trials_and_its_plan(said):
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(8, 8), nn.ReLU(), nn.Linear(8, 1))
    plan = actnn.fit(model, torch.randn(16, 8), "1 MB", loss=lambda net, x: net(x).sum())
    trials = said("actnn.planning.progress", logging.INFO)
    assert trials[0].endswith(": comparing recomputation with keeping all")
    assert [each.split("/")[0] for each in trials[:3]] == ["fit 1", "fit 2", "fit 3"]
    said_of_plans = said("actnn.planning.fit", logging.INFO)
    assert said_of_plans[0].startswith("peak ")
    assert said_of_plans[-1] == f"plan\n{plan}"
