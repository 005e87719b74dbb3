"""A small seeded BLIP-2, which sees an image before a text, and images by seed."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np

SIDE = 112
"""Pixels."""
IMAGE_TOKENS = 48
"""One and a half blocks, so that one of them has tokens of both."""
IMAGE_TOKEN = 2


def seeded_image(seed: int) -> Any:
    """Noise, as PIL has it."""
    from PIL import Image

    return Image.fromarray(np.random.default_rng(seed).integers(0, 255, (SIDE, SIDE, 3), dtype=np.uint8))


def make_image_model(folder: Path) -> None:
    """Write it with its processor, as transformers does. Its weights are so large that the image decides tokens."""
    import torch
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers
    from transformers import (
        Blip2Config,
        Blip2ForConditionalGeneration,
        Blip2Processor,
        Blip2QFormerConfig,
        Blip2VisionConfig,
        BlipImageProcessor,
        OPTConfig,
        PreTrainedTokenizerFast,
    )

    small = {"hidden_size": 64, "intermediate_size": 128, "num_hidden_layers": 2, "num_attention_heads": 2}
    text = OPTConfig(
        vocab_size=512,
        hidden_size=256,
        word_embed_proj_dim=256,
        num_hidden_layers=4,
        ffn_dim=512,
        num_attention_heads=4,
        max_position_embeddings=2048,
    )
    config = Blip2Config(
        vision_config=Blip2VisionConfig(**small, image_size=SIDE, patch_size=14).to_dict(),
        qformer_config=Blip2QFormerConfig(**small, encoder_hidden_size=64).to_dict(),
        text_config=text.to_dict(),
        num_query_tokens=IMAGE_TOKENS,
        image_token_index=IMAGE_TOKEN,
        dtype="float32",
    )
    with torch.random.fork_rng():
        torch.manual_seed(43)
        model: Any = Blip2ForConditionalGeneration(config)
        for name, parameter in model.named_parameters():
            if "norm" in name.lower() or name.endswith("bias"):
                torch.nn.init.constant_(parameter, float(name.endswith("weight")))
            else:
                torch.nn.init.normal_(parameter, std=0.15)
        model.to(torch.float32).save_pretrained(folder)
    vocabulary = ["<begin>", "<end>", "<image>", *sorted(pre_tokenizers.ByteLevel.alphabet())]
    words = Tokenizer(models.BPE(vocab={token: at for at, token in enumerate(vocabulary)}, merges=[]))
    words.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    words.decoder = decoders.ByteLevel()
    tokenizer = PreTrainedTokenizerFast(  # type: ignore[no-untyped-call]
        tokenizer_object=words,
        bos_token="<begin>",
        eos_token="<end>",
        pad_token="<end>",
        additional_special_tokens=["<image>"],
    )
    images: Any = BlipImageProcessor(size={"height": SIDE, "width": SIDE})
    Blip2Processor(images, tokenizer, num_query_tokens=IMAGE_TOKENS).save_pretrained(folder)
