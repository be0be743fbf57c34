"""A compressed model in several processes, under DDP and FSDP2."""

import copy
import datetime
import json
import os
import warnings
from pathlib import Path

import torch
import torch.distributed as dist
from actnn_models import Block, compressed_copy, gradients
from torch import nn
from torch.distributed.device_mesh import DeviceMesh

import actnn


def worker(rank: int, folder: str, processes: int, backend: str) -> None:
    """Compare gradients with those of torch's own DDP, and write the largest distances."""
    torch.set_num_threads(1)
    device = torch.device("cuda", rank) if backend == "nccl" else torch.device("cpu")
    if backend == "nccl":
        torch.cuda.set_device(device)
    dist.init_process_group(
        backend,
        init_method=f"file://{folder}/rendezvous",
        rank=rank,
        world_size=processes,
        timeout=datetime.timedelta(seconds=60),
    )
    torch.manual_seed(0)
    try:
        from torch.distributed.device_mesh import init_device_mesh
        from torch.distributed.fsdp import fully_shard
        from torch.nn.parallel import DistributedDataParallel

        # Without a mesh, torch takes the GPUs, also for models on the CPU.
        mesh = init_device_mesh(device.type, (processes,))
        model = nn.Sequential(Block(), Block(), nn.Linear(32, 4)).to(device)
        x = torch.randn(3, 7, 32, generator=torch.Generator().manual_seed(rank)).to(device)
        exact = gradients(DistributedDataParallel(copy.deepcopy(model)), x)[1:]
        found = {}
        for bits in (32, 8):
            ours = compressed_copy(model, bits=bits)
            found[f"ddp {bits}"] = gradients(DistributedDataParallel(ours), x)[1:]
            found[f"kept {bits}"] = {r.reason for r in ours.actnn.records if r.nbytes == 0}
            sharded = compressed_copy(model, bits=bits)
            _shard(sharded, mesh)
            gradients_ = gradients(sharded, x)[1:]
            found[f"fsdp {bits}"] = [gradient.full_tensor() for gradient in gradients_]
            held = {r.reason for r in sharded.actnn.records if r.held and r.shape in SHAPES}
            found[f"held weights {bits}"] = held
        # The weight of a norm is gone when the layer after it needs the norm's result.
        apart = nn.Sequential(nn.Linear(32, 32), nn.LayerNorm(32), nn.Linear(32, 4)).to(device)
        nn.init.normal_(apart[1].weight)
        others = {"apart": gradients(DistributedDataParallel(copy.deepcopy(apart)), x)[1:]}
        ours = compressed_copy(apart, bits=8)
        for layer in ours:
            fully_shard(layer, mesh=mesh)
        fully_shard(ours, mesh=mesh)
        found["apart 8"] = [gradient.full_tensor() for gradient in gradients(ours, x)[1:]]
        if backend == "nccl":  # torch synchronizes normalizations on GPUs alone
            images = torch.randn(4, 3, 9, 9, device=device)
            synchronized = nn.Sequential(
                nn.Conv2d(3, 4, 3, bias=False), nn.SyncBatchNorm(4), nn.ReLU()
            )
            synchronized = DistributedDataParallel(synchronized.to(device))
            others["synchronized"] = gradients(synchronized, images)[1:]
            ours = DistributedDataParallel(compressed_copy(synchronized.module, bits=8))
            found["synchronized 8"] = gradients(ours, images)[1:]
        for name, wrap in (
            ("ddp", DistributedDataParallel),
            ("fsdp", lambda each: _shard(each, mesh)),
        ):
            ours = actnn.compress(copy.deepcopy(model), level="L3", min_bytes=0)
            others[f"L3 {name}"] = _level_3(wrap(ours), ours, rank)
        errors = {"L3": [others["L3 ddp"], others["L3 fsdp"]]}
        for name, values in found.items():
            if isinstance(values, list):
                pairs = zip(others.get(name.split()[0], exact), values, strict=True)
                errors[name] = max(float((a - b).norm() / (a.norm() + 1e-3)) for a, b in pairs)
            else:
                errors[name] = sorted(values)
        Path(folder, f"{rank}.json").write_text(json.dumps(errors))
    finally:
        dist.destroy_process_group()
    if backend == "nccl":  # a thread may release tensors after the interpreter has ended
        os._exit(0)


def _shard(model: nn.Module, mesh: DeviceMesh) -> nn.Module:
    from torch.distributed.fsdp import fully_shard

    for block in model[:2]:
        fully_shard(block, mesh=mesh)
    return fully_shard(model, mesh=mesh)


def _level_3(wrapped: nn.Module, model: nn.Module, rank: int) -> dict[str, object]:
    """Return what level L3 has measured after some steps, and whether gradients are the same."""
    random = torch.Generator().manual_seed(rank)
    device = next(model.parameters()).device
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        for _ in range(4):
            found = gradients(wrapped, torch.randn(3, 7, 32, generator=random).to(device))[1:]
    whole = [g.full_tensor() if hasattr(g, "full_tensor") else g for g in found]
    total = torch.stack([g.double().sum() for g in whole]).sum()
    every = [torch.zeros_like(total) for _ in range(dist.get_world_size())]
    dist.all_gather(every, total)
    adaptive = model.actnn.adaptive
    return {
        "bits": sorted(adaptive.bits.values()),
        "runs": adaptive._trials.runs,
        "same": all(torch.equal(each, total) for each in every),
        "warnings": [str(w.message) for w in caught if w.category is actnn.ActNNWarning],
    }


SHAPES = {(32, 96), (32, 128), (128, 32), (32, 4)}  # of weights as they are saved


def check(folder: Path, processes: int, exact: float) -> None:
    """Check what the processes have written; `exact` is the largest distance without rounding."""
    for rank in range(processes):
        found = json.loads((folder / f"{rank}.json").read_text())
        assert found["ddp 32"] <= (0 if exact < 1e-5 else exact)
        assert found["fsdp 32"] < exact
        assert 0 < found["ddp 8"] < 0.05
        assert 0 < found["fsdp 8"] < 0.05
        assert 0 < found["apart 8"] < 0.05
        assert 0 <= found.get("synchronized 8", 0) < 0.05
        assert "view of a parameter" in found["kept 8"]
        assert found["held weights 8"] == []
        ddp, fsdp = found["L3"]
        assert ddp["same"]
        assert fsdp["same"]
        assert len(set(ddp["bits"])) > 1
        assert ddp["runs"] > 5
        assert fsdp["bits"] == []
        assert len(fsdp["warnings"]) == 1
        assert "fully_shard" in fsdp["warnings"][0]
