# %% [markdown]
# # A model into less memory
#
# `actnn` trains any PyTorch model in less memory: what autograd keeps from forward to backward is
# stored in a few bits, recomputed or moved. Here a small GPT-2 of the library `transformers` learns
# to write like this project's documentation. It is made from a configuration object, so nothing is
# downloaded.
#
# The notebook takes half a minute on two cores. It needs a clone of the repository and
# `pip install transformers`.

# %%
import copy
import time
from pathlib import Path

import torch
from transformers import GPT2Config, GPT2LMHeadModel

import actnn

ROOT = next(p for p in [Path.cwd(), *Path.cwd().parents] if (p / "docs/actnn.md").exists())

# %% [markdown]
# ## Model and data
#
# The text is read as bytes, so there is no tokenizer.

# %%
config = GPT2Config(
    vocab_size=256,
    n_positions=128,
    n_embd=128,
    n_layer=3,
    n_head=4,
    resid_pdrop=0.0,
    embd_pdrop=0.0,
    attn_pdrop=0.0,
    use_cache=False,
    bos_token_id=None,
    eos_token_id=None,
)
torch.manual_seed(0)
start = GPT2LMHeadModel(config).train()
pages = sorted((ROOT / "docs").glob("*.md"))
text = torch.frombuffer(
    bytearray(b"".join(p.read_bytes() for p in pages)), dtype=torch.uint8
).long()
print(f"{sum(p.numel() for p in start.parameters()):,} parameters, {len(text):,} bytes of text")


def batch_of(step, rows=8, steps=128):
    """Windows (8, 128) of the text, the same for every model."""
    generator = torch.Generator().manual_seed(step)
    begin = torch.randint(len(text) - steps, (rows,), generator=generator)
    return torch.stack([text[i : i + steps] for i in begin.tolist()])


def loss_of(model, batch):
    scores = model(input_ids=batch).logits[:, :-1]
    return torch.nn.functional.cross_entropy(scores.flatten(0, 1), batch[:, 1:].flatten())


batch = batch_of(0)

# %% [markdown]
# ## What would it hold?
#
# `estimate` answers before any training: bytes from forward to backward for several choices.

# %%
print(actnn.estimate(start, batch, loss=loss_of))

# %% [markdown]
# ## Three ways to train
#
# Each starts from the same weights and sees the same batches. `compress` is one line. Parameters,
# hooks, `state_dict` and the training loop stay as they are.

# %%


def trained(prepare, count=25):
    """Losses of some steps, seconds of a step, and the report on one more step."""
    model = copy.deepcopy(start)
    prepare(model)
    optimizer = torch.optim.AdamW(model.parameters(), 1e-3)
    losses, begin = [], time.perf_counter()
    for step in range(count):
        optimizer.zero_grad()
        loss = loss_of(model, batch_of(step))
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    seconds = (time.perf_counter() - begin) / count
    model.zero_grad()
    return losses, seconds, actnn.report(model, lambda: loss_of(model, batch))


ways = {
    "exact": lambda model: actnn.compress(model, level="L0"),
    "8 bits": lambda model: actnn.compress(model, bits=8),
    "4 bits": lambda model: actnn.compress(model, bits=4),
}
results = {name: trained(prepare) for name, prepare in ways.items()}

print(f"{'':15}{'held MB':>9}{'peak MB':>9}{'ms':>6}{'first loss':>12}{'last loss':>11}")
for name, (losses, seconds, report) in results.items():
    print(
        f"{name:15}{report.held / 1e6:9.1f}{report.peak / 1e6:9.1f}{seconds * 1e3:6.0f}"
        f"{losses[0]:12.4f}{losses[-1]:11.4f}"
    )

# %% [markdown]
# The forward is exact in all of them, so first losses are equal. With 8 and 4 bits, gradients
# have a little noise and later losses differ a little. A step takes longer, as codes are computed.
#
# ## A budget
#
# `fit` measures what each block costs under each choice, and takes the fastest plan whose peak is
# below the budget.

# %%
exact = results["exact"][2].peak
model = copy.deepcopy(start)
plan = actnn.fit(model, batch, round(0.6 * exact), loss=loss_of, bits=(4,), max_seconds=10)
print(plan)
assert plan.peak <= 0.6 * exact

# %% [markdown]
# The model is ready: train it as before. `actnn.uncompress(model)` undoes it.

# %%
before = {name: value.clone() for name, value in model.state_dict().items()}
loss_of(model, batch).backward()
assert all(torch.equal(value, before[name]) for name, value in model.state_dict().items())
model = actnn.uncompress(model)
