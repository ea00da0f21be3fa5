"""Random mlx-lm models with the real geometry of a cached token, small in all else."""

from __future__ import annotations

from importlib import import_module
from typing import Any

import mlx.core as mx

VOCABULARY = 64
HEADS = 4
_COMMON = {
    "vocab_size": VOCABULARY,
    "hidden_size": 32,
    "intermediate_size": 32,
    "moe_intermediate_size": 16,
    "num_hidden_layers": 2,
    "num_attention_heads": HEADS,
    "num_key_value_heads": HEADS,
    "q_lora_rank": 24,
    "kv_lora_rank": 512,
    "qk_rope_head_dim": 64,
    "qk_nope_head_dim": 16,
    "v_head_dim": 16,
    "head_dim": 16,
    "max_position_embeddings": 4096,
    "rms_norm_eps": 1e-6,
    "rope_theta": 10000.0,
    "routed_scaling_factor": 1.0,
    "n_group": 1,
    "topk_group": 1,
    "num_experts_per_tok": 1,
    "first_k_dense_replace": 2,  # dense layers alone
    "norm_topk_prob": True,
}
_LINEAR = {"kda_layers": [1], "full_attn_layers": [2], "num_heads": 2, "head_dim": 32}
_LINEAR |= {"short_conv_kernel_size": 4}
_KIMI = {
    "linear_attn_config": _LINEAR,
    "model_max_length": 4096,
    "num_experts": 2,
    "mla_use_nope": True,
    "num_experts_per_token": 1,
}
_BAILING = {
    "num_experts": 2,
    "num_shared_experts": 1,
    "layer_group_size": 2,
    "group_norm_size": 2,
    "moe_shared_expert_intermediate_size": 16,
}
_LONGCAT = {
    "attention_method": "MLA",
    "zero_expert_type": "identity",
    "ffn_hidden_size": 32,
    "moe_topk": 1,
    "expert_ffn_hidden_size": 16,
    "n_routed_experts": 2,
    "zero_expert_num": 1,
    "num_layers": 1,
    "mla_scale_q_lora": True,
    "mla_scale_kv_lora": True,
    "attention_bias": False,
}
_INDEXED = {"index_head_dim": 128, "index_n_heads": 2, "index_topk": 512}
_MISTRAL = {
    "n_shared_experts": 1,
    "n_routed_experts": 2,
    "rope_parameters": {
        "rope_theta": 10000.0,
        "llama_4_scaling_beta": 0.1,
        "original_max_position_embeddings": 8,  # short, so that the scale is not 1 throughout
        "rope_type": "default",
    },
}
_K3 = {"attn_res_block_size": 2, "mla_use_output_gate": True, "hidden_act": "situ"}
_K3 |= {"activation_situ_beta": 1.0, "activation_situ_linear_beta": 1.0, "mla_use_nope": True}
_K3 |= {"linear_attn_config": {**_LINEAR, "gate_lower_bound": -5.0}, "num_experts": 2}

# Each attention class of `mla_classes.CLASSES` by the module that it is in.
CONFIGS: dict[str, dict[str, Any]] = {
    "deepseek_v3": {},
    "deepseek_v32": _INDEXED,
    "glm4_moe_lite": {},
    "kimi_linear": _KIMI,
    "kimi_k3": _K3,
    "longcat_flash": _LONGCAT,
    "bailing_hybrid": _BAILING,
    "bailing_moe_v3": _BAILING,
    "mistral4": _MISTRAL,
}

# Those of `absorb.CLASSES`, which cache keys and values of every head.
_ROPE = {"original_max_position_embeddings": 4096, "factor": 1, "type": "yarn"}
FULL_CONFIGS: dict[str, dict[str, Any]] = {
    "deepseek_v2": {"rope_scaling": _ROPE},
    "youtu_llm": {},
    "minicpm3": {
        "kv_lora_rank": 256,
        "qk_rope_head_dim": 32,
        "dim_model_base": 32,
        "scale_depth": 1.4,
        "scale_emb": 2,
        "rope_scaling": {**_ROPE, "long_factor": [1.0 + at / 16 for at in range(16)]},
    },
}


def tiny_config(name: str, **changes: Any) -> dict[str, Any]:
    """What its config.json would hold."""
    return {"model_type": name, **_COMMON, **{**CONFIGS, **FULL_CONFIGS}[name], **changes}


def tiny_model(name: str, dtype: mx.Dtype = mx.float32, **changes: Any) -> Any:
    """A model ready to infer: the same weights for the same name."""
    module = import_module(f"mlx_lm.models.{name}")
    mx.random.seed(7)
    model = module.Model(module.ModelArgs.from_dict(tiny_config(name, **changes)))
    model.set_dtype(dtype)
    model.eval()
    mx.eval(model.parameters())
    return model
