"""Models from configuration objects, and batches for them."""

from __future__ import annotations

from typing import Any

import torch
from trainer_packages import package


def ids(*shape: int) -> torch.Tensor:
    return torch.randint(5, 200, shape, generator=torch.Generator().manual_seed(0))


def llama(**settings: Any) -> Any:
    transformers = package("transformers")
    torch.manual_seed(0)
    sizes = {"hidden_size": 64, "intermediate_size": 128, "vocab_size": 256}
    heads = {"num_hidden_layers": 2, "num_attention_heads": 4, "num_key_value_heads": 2}
    special = {"bos_token_id": 1, "eos_token_id": 2, "pad_token_id": 0}
    config = transformers.LlamaConfig(**sizes, **heads, **special, **settings)
    return transformers.LlamaForCausalLM(config)


def gpt2(**settings: Any) -> Any:
    transformers = package("transformers")
    torch.manual_seed(0)
    sizes = {"n_embd": 64, "n_layer": 2, "n_head": 4, "n_positions": 64, "vocab_size": 256}
    config = transformers.GPT2Config(**sizes, bos_token_id=1, eos_token_id=2, **settings)
    return transformers.GPT2LMHeadModel(config)


def with_lora(model: Any) -> Any:
    peft = package("peft")
    torch.manual_seed(1)
    names = ["q_proj", "v_proj"]
    return peft.get_peft_model(model, peft.LoraConfig(target_modules=names, task_type="CAUSAL_LM"))
