"""The models of the coverage table: small, with random parameters in float64, and dropout off."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

Example = tuple[nn.Module, dict[str, Any]]

BATCH, TOKENS, VOCAB, HIDDEN, LAYERS, HEADS, FFN, IMAGE = 2, 8, 64, 32, 2, 4, 64, 32
COMMON: dict[str, Any] = {
    "vocab_size": VOCAB,
    "hidden_size": HIDDEN,
    "num_hidden_layers": LAYERS,
    "num_attention_heads": HEADS,
    "pad_token_id": 0,
    "bos_token_id": 1,
    "eos_token_id": 2,
}
FED: dict[str, Any] = {"intermediate_size": FFN}
GROUPED: dict[str, Any] = {"num_key_value_heads": 2, "max_position_embeddings": 32} | FED
EAGER: dict[str, Any] = {"experts_implementation": "eager"}
"""A loop over experts with data-dependent sizes: the grouped kernel, which is the default, has no float64."""
EXPERTS: dict[str, Any] = {"moe_intermediate_size": 32, "num_experts_per_tok": 2} | GROUPED | EAGER
LATENT: dict[str, Any] = {
    "n_routed_experts": 4, "first_k_dense_replace": 1, "q_lora_rank": 16, "kv_lora_rank": 16, "qk_rope_head_dim": 8,
    "qk_nope_head_dim": 8, "v_head_dim": 8, "head_dim": 8, "n_group": 2, "topk_group": 1,
} | EXPERTS | {"num_key_value_heads": HEADS}  # fmt: skip


def causal(name: str, config: str = "", **sizes: Any) -> Callable[[], Example]:
    """A causal language model of transformers, with labels."""
    return lambda: (_made(name, config, COMMON | sizes), {"input_ids": ids(), "labels": ids()})


def encoder(name: str, config: str = "", **sizes: Any) -> Callable[[], Example]:
    """A masked language model of transformers, with a mask and labels."""
    inputs = {"input_ids": ids, "attention_mask": ones, "labels": ids}
    return lambda: (_made(name, config, COMMON | FED | sizes), {k: make() for k, make in inputs.items()})


def seq2seq(name: str, config: str = "", **sizes: Any) -> Callable[[], Example]:
    """An encoder and decoder of transformers over tokens."""
    inputs = {"input_ids": ids, "attention_mask": ones, "decoder_input_ids": ids, "labels": ids}
    return lambda: (_made(name, config, COMMON | sizes), {k: make() for k, make in inputs.items()})


def images(name: str, config: str = "", **sizes: Any) -> Callable[[], Example]:
    """An image classifier of transformers."""
    sizes = {"num_labels": 8} | sizes
    inputs = {"pixel_values": torch.zeros(BATCH, 3, IMAGE, IMAGE), "labels": torch.zeros(BATCH, dtype=torch.long)}
    return lambda: (_made(name, config, sizes), dict(inputs))


def ids(batch: int = BATCH, length: int = TOKENS) -> Tensor:
    """Token numbers (batch, length)."""
    return torch.zeros(batch, length, dtype=torch.long)


def ones() -> Tensor:
    """An attention mask that hides nothing."""
    return torch.ones(BATCH, TOKENS, dtype=torch.long)


def _made(name: str, config: str, sizes: dict[str, Any]) -> nn.Module:
    """A transformers model by class name; dropout of any kind is off."""
    import transformers

    head = getattr(transformers, name)
    kind = getattr(transformers, config) if config else head.config_class
    made = kind(**sizes)
    _without_dropout(made)
    return head(made)  # type: ignore[no-any-return]


def _without_dropout(config: Any) -> None:
    for key, value in vars(config).items():
        if any(word in key for word in ("drop", "pdrop")) and isinstance(value, float):
            setattr(config, key, 0.0)
        if hasattr(value, "to_dict"):
            _without_dropout(value)


def _whisper() -> Example:
    sizes = {
        "d_model": HIDDEN, "encoder_layers": LAYERS, "decoder_layers": LAYERS, "encoder_attention_heads": HEADS,
        "decoder_attention_heads": HEADS, "encoder_ffn_dim": FFN, "decoder_ffn_dim": FFN, "num_mel_bins": 8,
        "max_source_positions": TOKENS, "max_target_positions": 32, "vocab_size": VOCAB, "pad_token_id": 0,
        "bos_token_id": 1, "eos_token_id": 2, "decoder_start_token_id": 1, "suppress_tokens": None,
        "begin_suppress_tokens": None,
    }  # fmt: skip
    features = torch.zeros(BATCH, 8, 2 * TOKENS)
    return _made("WhisperForConditionalGeneration", "", sizes), {"input_features": features, "labels": ids()}


def _clip() -> Example:
    text = {k: v for k, v in COMMON.items() if k != "vocab_size"} | {"vocab_size": VOCAB, "projection_dim": 16} | FED
    vision = {"image_size": IMAGE, "patch_size": 8} | FED
    vision |= {"hidden_size": HIDDEN, "num_hidden_layers": LAYERS, "num_attention_heads": HEADS, "projection_dim": 16}
    sizes = {"text_config": text, "vision_config": vision, "projection_dim": 16}
    model = _made("CLIPModel", "", sizes)
    pixels = torch.zeros(BATCH, 3, IMAGE, IMAGE)
    inputs = {"input_ids": ids(), "pixel_values": pixels, "attention_mask": ones(), "return_loss": True}
    return model, inputs


def _wav2vec2() -> Example:
    sizes = COMMON | FED | {
        "conv_dim": (16, 16), "conv_kernel": (4, 4), "conv_stride": (2, 2), "num_feat_extract_layers": 2,
        "num_conv_pos_embeddings": 4, "num_conv_pos_embedding_groups": 2, "mask_time_prob": 0.0,
        "apply_spec_augment": False, "num_labels": 8, "classifier_proj_size": 16,
    }  # fmt: skip
    inputs = {"input_values": torch.zeros(BATCH, 64), "labels": torch.zeros(BATCH, dtype=torch.long)}
    return _made("Wav2Vec2ForSequenceClassification", "", sizes), inputs


class LstmLanguageModel(nn.Module):
    """Embedding, two LSTM layers and a head."""

    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(VOCAB, HIDDEN)
        self.lstm = nn.LSTM(HIDDEN, HIDDEN, 2, batch_first=True)
        self.head = nn.Linear(HIDDEN, VOCAB)

    def forward(self, input_ids: Tensor, labels: Tensor) -> Tensor:
        hidden, _ = self.lstm(self.embed(input_ids))
        return F.cross_entropy(self.head(hidden).flatten(0, 1), labels.flatten())


class UNetBlock(nn.Module):
    """Two convolutions with group norm, and a residual."""

    def __init__(self, before: int, after: int) -> None:
        super().__init__()
        self.first, self.second = nn.Conv2d(before, after, 3, padding=1), nn.Conv2d(after, after, 3, padding=1)
        self.norm, self.again = nn.GroupNorm(4, after), nn.GroupNorm(4, after)
        self.skip = nn.Conv2d(before, after, 1)

    def forward(self, x: Tensor) -> Tensor:
        hidden = F.silu(self.norm(self.first(x)))
        return F.silu(self.again(self.second(hidden))) + self.skip(x)


class UNet(nn.Module):
    """Three resolutions down and up again, joined by skips; predicts an image."""

    def __init__(self) -> None:
        super().__init__()
        widths = (8, 16, 32)
        self.down = nn.ModuleList(UNetBlock(a, b) for a, b in zip((4, *widths), widths, strict=False))
        self.up = nn.ModuleList(UNetBlock(a + b, b) for a, b in ((32, 16), (16, 8)))
        self.last = nn.Conv2d(8, 4, 1)

    def forward(self, image: Tensor, target: Tensor) -> Tensor:
        skips = []
        x = image
        for i, block in enumerate(self.down):
            x = block(F.avg_pool2d(x, 2) if i else x)
            skips.append(x)
        for block, skip in zip(self.up, reversed(skips[:-1]), strict=True):
            x = block(torch.cat((F.interpolate(x, scale_factor=2.0, mode="nearest"), skip), dim=1))
        return F.mse_loss(self.last(x), target)


class Dlrm(nn.Module):
    """Large tables, a bottom and a top network, and products of all pairs of features."""

    def __init__(self) -> None:
        super().__init__()
        self.tables = nn.ModuleList(nn.EmbeddingBag(rows, 16, mode="sum") for rows in (4096, 64, 1024, 256))
        self.bottom = nn.Sequential(nn.Linear(8, 32), nn.ReLU(), nn.Linear(32, 16))
        self.top = nn.Sequential(nn.Linear(16 + 10, 32), nn.ReLU(), nn.Linear(32, 1))
        self.register_buffer("pairs", torch.tril_indices(5, 5, -1), persistent=False)

    def forward(self, dense: Tensor, sparse: Tensor, clicked: Tensor) -> Tensor:
        features = [self.bottom(dense)]
        features += [table(sparse[:, i]) for i, table in enumerate(self.tables)]
        stacked = torch.stack(features, dim=1)
        products = stacked @ stacked.transpose(1, 2)
        joined = torch.cat((features[0], products[:, self.pairs[0], self.pairs[1]]), dim=1)
        return F.binary_cross_entropy_with_logits(self.top(joined).squeeze(1), clicked)


class DiTBlock(nn.Module):
    """A transformer block whose norms are scaled, shifted and gated by a condition."""

    def __init__(self) -> None:
        super().__init__()
        self.norm, self.again = (nn.LayerNorm(HIDDEN, elementwise_affine=False) for _ in range(2))
        self.attention = nn.MultiheadAttention(HIDDEN, HEADS, batch_first=True)
        self.mlp = nn.Sequential(nn.Linear(HIDDEN, FFN), nn.GELU(approximate="tanh"), nn.Linear(FFN, HIDDEN))
        self.condition = nn.Sequential(nn.SiLU(), nn.Linear(HIDDEN, 6 * HIDDEN))

    def forward(self, x: Tensor, c: Tensor) -> Tensor:
        shift, scale, gate, shift2, scale2, gate2 = self.condition(c).unsqueeze(1).chunk(6, dim=-1)
        normed = self.norm(x) * (1 + scale) + shift
        x = x + gate * self.attention(normed, normed, normed, need_weights=False)[0]
        return x + gate2 * self.mlp(self.again(x) * (1 + scale2) + shift2)  # type: ignore[no-any-return]


class DiffusionTransformer(nn.Module):
    """Patches, time steps and classes in; the noise out."""

    def __init__(self) -> None:
        super().__init__()
        self.patch = nn.Conv2d(4, HIDDEN, 2, stride=2)
        self.positions = nn.Parameter(torch.zeros(1, 16, HIDDEN))
        self.classes = nn.Embedding(8, HIDDEN)
        self.time = nn.Sequential(nn.Linear(HIDDEN, HIDDEN), nn.SiLU(), nn.Linear(HIDDEN, HIDDEN))
        self.blocks = nn.ModuleList(DiTBlock() for _ in range(LAYERS))
        self.last = nn.Linear(HIDDEN, 16)

    def forward(self, image: Tensor, time: Tensor, label: Tensor, noise: Tensor) -> Tensor:
        steps = torch.arange(HIDDEN // 2, device=image.device)
        angles = time[:, None] * torch.exp(-steps / HIDDEN)[None]
        c = self.time(torch.cat((angles.cos(), angles.sin()), dim=-1)) + self.classes(label)
        x = self.patch(image).flatten(2).transpose(1, 2) + self.positions
        for block in self.blocks:
            x = block(x, c)
        out = self.last(x).unflatten(1, (4, 4)).unflatten(-1, (2, 2, 4))
        return F.mse_loss(torch.einsum("nhwpqc->nchpwq", out).reshape(-1, 4, 8, 8), noise)


class GraphNetwork(nn.Module):
    """Messages along edges, summed at their ends; one graph of the same size a sample."""

    def __init__(self) -> None:
        super().__init__()
        self.message = nn.ModuleList(nn.Linear(2 * HIDDEN, HIDDEN) for _ in range(2))
        self.update = nn.ModuleList(nn.Linear(2 * HIDDEN, HIDDEN) for _ in range(2))
        self.embed, self.head = nn.Linear(8, HIDDEN), nn.Linear(HIDDEN, 4)

    def forward(self, nodes: Tensor, source: Tensor, target: Tensor, labels: Tensor) -> Tensor:
        x = self.embed(nodes)
        for message, update in zip(self.message, self.update, strict=True):
            start, end = (i.unsqueeze(-1).expand(-1, -1, HIDDEN) for i in (source, target))
            sent = torch.relu(message(torch.cat((x.gather(1, start), x.gather(1, end)), dim=-1)))
            received = torch.zeros_like(x).scatter_add(1, end, sent)
            x = x + torch.relu(update(torch.cat((x, received), dim=-1)))
        return F.cross_entropy(self.head(x.mean(dim=1)), labels)


class Translator(nn.Module):
    """`nn.Transformer` over embedded tokens, sequence first inside."""

    def __init__(self, batch_first: bool) -> None:
        super().__init__()
        self.batch_first = batch_first
        self.embed, self.head = nn.Embedding(VOCAB, HIDDEN), nn.Linear(HIDDEN, VOCAB)
        sizes = {"nhead": HEADS, "num_encoder_layers": LAYERS, "num_decoder_layers": LAYERS, "dim_feedforward": FFN}
        self.transformer = nn.Transformer(HIDDEN, dropout=0.0, batch_first=batch_first, **sizes)  # type: ignore[arg-type]

    def forward(self, source: Tensor, target: Tensor, labels: Tensor) -> Tensor:
        x, y = self.embed(source), self.embed(target)
        mask = nn.Transformer.generate_square_subsequent_mask(target.shape[1], device=x.device, dtype=x.dtype)
        if self.batch_first:
            out = self.transformer(x, y, tgt_mask=mask)
        else:
            out = self.transformer(x.transpose(0, 1), y.transpose(0, 1), tgt_mask=mask).transpose(0, 1)
        return F.cross_entropy(self.head(out).flatten(0, 1), labels.flatten())


def _lstm() -> Example:
    return LstmLanguageModel(), {"input_ids": ids(), "labels": ids()}


def _unet() -> Example:
    return UNet(), {"image": torch.zeros(BATCH, 4, 16, 16), "target": torch.zeros(BATCH, 4, 16, 16)}


def _dlrm() -> Example:
    sparse = torch.zeros(BATCH, 4, 3, dtype=torch.long)
    return Dlrm(), {"dense": torch.zeros(BATCH, 8), "sparse": sparse, "clicked": torch.zeros(BATCH)}


def _dit() -> Example:
    image = torch.zeros(BATCH, 4, 8, 8)
    label = torch.zeros(BATCH, dtype=torch.long)
    return DiffusionTransformer(), {"image": image, "time": torch.zeros(BATCH), "label": label, "noise": image.clone()}


def _graph() -> Example:
    edges = torch.zeros(BATCH, 12, dtype=torch.long)
    labels = torch.zeros(BATCH, dtype=torch.long)
    inputs = {"nodes": torch.zeros(BATCH, 6, 8), "source": edges, "target": edges.clone(), "labels": labels}
    return GraphNetwork(), inputs


def _translator(batch_first: bool) -> Example:
    return Translator(batch_first), {"source": ids(), "target": ids(), "labels": ids()}


MODELS: dict[str, Callable[[], Example]] = {
    "GPT-2": causal("GPT2LMHeadModel", n_positions=32),
    "GPT-Neo": causal(
        "GPTNeoForCausalLM", max_position_embeddings=32, attention_types=[[["global", "local"], 1]], window_size=4,
        num_layers=LAYERS, num_heads=HEADS,
    ),
    "GPT-J": causal("GPTJForCausalLM", n_positions=32, rotary_dim=4),
    "GPT-NeoX": causal("GPTNeoXForCausalLM", max_position_embeddings=32, **FED),
    "OPT": causal("OPTForCausalLM", ffn_dim=FFN, max_position_embeddings=32, word_embed_proj_dim=HIDDEN),
    "BLOOM": causal("BloomForCausalLM"),
    "Falcon": causal("FalconForCausalLM"),
    "MPT": causal("MptForCausalLM", max_seq_len=32, n_layers=LAYERS, n_heads=HEADS, d_model=HIDDEN),
    "Llama": causal("LlamaForCausalLM", **GROUPED),
    "Mistral": causal("MistralForCausalLM", sliding_window=4, **GROUPED),
    "Mixtral": causal("MixtralForCausalLM", num_local_experts=4, **GROUPED, **EAGER),
    "Qwen2": causal("Qwen2ForCausalLM", **GROUPED),
    "Qwen3": causal("Qwen3ForCausalLM", head_dim=8, **GROUPED),
    "Qwen2-MoE": causal("Qwen2MoeForCausalLM", num_experts=4, shared_expert_intermediate_size=32, **EXPERTS),
    "Gemma": causal("GemmaForCausalLM", head_dim=8, **GROUPED),
    "Gemma 2": causal("Gemma2ForCausalLM", head_dim=8, sliding_window=4, **GROUPED),
    "Gemma 3": causal("Gemma3ForCausalLM", "Gemma3TextConfig", head_dim=8, sliding_window=4, **GROUPED),
    "Phi": causal("PhiForCausalLM", **GROUPED),
    "StableLM": causal("StableLmForCausalLM", **GROUPED),
    "OLMo": causal("OlmoForCausalLM", **GROUPED),
    "SmolLM3": causal("SmolLM3ForCausalLM", **GROUPED),
    "DeepSeek-V2": causal("DeepseekV2ForCausalLM", **LATENT),
    "DeepSeek-V3": causal("DeepseekV3ForCausalLM", **LATENT),
    "Mamba": causal("MambaForCausalLM", state_size=8, time_step_rank=4),
    "Granite": causal("GraniteForCausalLM", **GROUPED),
    "Cohere 2": causal("Cohere2ForCausalLM", sliding_window=4, **GROUPED),
    "Nemotron": causal("NemotronForCausalLM", head_dim=8, **GROUPED),
    "GLM-4": causal("Glm4ForCausalLM", head_dim=8, **GROUPED),
    "Starcoder2": causal("Starcoder2ForCausalLM", **GROUPED),
    "GPT-BigCode": causal("GPTBigCodeForCausalLM", n_positions=32, n_embd=HIDDEN, n_layer=LAYERS, n_head=HEADS),
    "gpt-oss": causal(
        "GptOssForCausalLM", num_local_experts=4, num_experts_per_tok=2, head_dim=8, sliding_window=4, **GROUPED,
        **EAGER,
    ),
    "Qwen3-MoE": causal("Qwen3MoeForCausalLM", num_experts=4, head_dim=8, **EXPERTS),
    "RecurrentGemma": causal(
        "RecurrentGemmaForCausalLM", lru_width=HIDDEN, attention_window_size=4, conv1d_width=4, num_key_value_heads=1,
        head_dim=8, num_hidden_layers=3, **FED,
    ),
    "Falcon-Mamba": causal("FalconMambaForCausalLM", state_size=8, time_step_rank=4),
    "Mamba 2": causal("Mamba2ForCausalLM", state_size=8, num_heads=8, head_dim=8, n_groups=1, chunk_size=4),
    "BERT": encoder("BertForMaskedLM", max_position_embeddings=32),
    "RoBERTa": encoder("RobertaForMaskedLM", max_position_embeddings=32),
    "ALBERT": encoder("AlbertForMaskedLM", max_position_embeddings=32, embedding_size=16),
    "DistilBERT": encoder("DistilBertForMaskedLM", max_position_embeddings=32, hidden_dim=FFN),
    "ELECTRA": encoder("ElectraForMaskedLM", max_position_embeddings=32, embedding_size=16),
    "DeBERTa": encoder(
        "DebertaForMaskedLM", max_position_embeddings=32, relative_attention=True, pos_att_type=["p2c", "c2p"],
    ),
    "XLNet": causal("XLNetLMHeadModel", d_model=HIDDEN, n_layer=LAYERS, n_head=HEADS, d_inner=FFN),
    "T5": seq2seq("T5ForConditionalGeneration", d_kv=8, d_ff=FFN, num_layers=LAYERS, num_decoder_layers=LAYERS),
    "BART": seq2seq(
        "BartForConditionalGeneration", d_model=HIDDEN, encoder_layers=LAYERS, decoder_layers=LAYERS,
        encoder_attention_heads=HEADS, decoder_attention_heads=HEADS, encoder_ffn_dim=FFN, decoder_ffn_dim=FFN,
        max_position_embeddings=32,
    ),
    "Whisper": _whisper,
    "ViT": images(
        "ViTForImageClassification", image_size=IMAGE, patch_size=8, **FED,
        **{k: v for k, v in COMMON.items() if "hidden" in k or "heads" in k},
    ),
    "Swin": images(
        "SwinForImageClassification", image_size=IMAGE, patch_size=2, embed_dim=16, depths=[2, 2], num_heads=[2, 4],
        window_size=4,
    ),
    "ConvNeXt": images(
        "ConvNextForImageClassification", image_size=IMAGE, hidden_sizes=[8, 16], depths=[1, 2], num_stages=2,
    ),
    "ResNet": images(
        "ResNetForImageClassification", embedding_size=8, hidden_sizes=[8, 16], depths=[1, 2], layer_type="basic",
    ),
    "CLIP": _clip,
    "Wav2Vec2": _wav2vec2,
    "LSTM language model": _lstm,
    "U-Net with group norm": _unet,
    "DLRM-like, large tables": _dlrm,
    "diffusion transformer": _dit,
    "graph network": _graph,
    "nn.Transformer": lambda: _translator(batch_first=True),
    "nn.Transformer, sequence first": lambda: _translator(batch_first=False),
}  # fmt: skip
"""Small models by name: from `transformers`, then plain PyTorch."""


def example(name: str) -> Example:
    """A model in float64 with random parameters, in training, and example inputs: the same on every process."""
    torch.manual_seed(0)
    model, inputs = MODELS[name]()
    generator = torch.Generator().manual_seed(1)
    model.double().train()
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.copy_(0.2 * torch.randn(parameter.shape, generator=generator, dtype=torch.float64))
    wide = {k: v.double() if isinstance(v, Tensor) and v.is_floating_point() else v for k, v in inputs.items()}
    return model, wide
