"""
Text, with LoRA
===============

Four clients write in words of their own, and train a small language model together. The network
stays as it is: clients train and send low-rank matrices beside its layers, a small part of its
numbers. It needs ``pip install '.[lora]'``.
"""

# %%
# A text in four parts, each with favourite words. Bytes are the tokens, so no tokenizer is needed.
import random
from pathlib import Path

import matplotlib.pyplot as plt
import pytorch_lightning as pl

import fl_lightning
from fl_lightning import FederatedModule, MetricsCSV
from fl_lightning.callbacks import CommunicationLogger
from fl_lightning.datamodules import LanguageModelling
from fl_lightning.models import CausalLanguageModel

folder = Path("runs/examples/text_with_lora")
folder.mkdir(parents=True, exist_ok=True)
draw = random.Random(0)
common = ["the", "and", "of", "to"]
parts = [
    ["river", "boat", "water"],
    ["king", "crown", "castle"],
    ["bread", "salt", "oven"],
    ["stars", "night", "moon"],
]
words = []
for own in parts:
    words += [draw.choice(common + own * 2) for _ in range(800)]
# Held out are words of all four.
words += [draw.choice(common + draw.choice(parts) * 2) for _ in range(350)]
(folder / "input.txt").write_text(" ".join(words))

# %%
# A tiny OPT of random weights; ``path="…/opt-125m"`` would read one from a local folder instead.
pl.seed_everything(0)
architecture = {
    "model_type": "opt",
    "vocab_size": 259,
    "hidden_size": 64,
    "word_embed_proj_dim": 64,
    "ffn_dim": 128,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "max_position_embeddings": 64,
    "dropout": 0.0,
    "init_std": 0.1,
    "pad_token_id": 0,
    "bos_token_id": 1,
    "eos_token_id": 1,
}
lora = {"r": 8, "target_modules": ["q_proj", "v_proj", "fc1", "fc2"]}
learner = CausalLanguageModel(config=architecture, lora=lora, lr=0.02)

# %%
# From here on it is a run like any other.
data = LanguageModelling(folder, length=32, num_clients=4, test_fraction=0.1)
module = FederatedModule(learner, participation="all", local_epochs=1)
trainer = pl.Trainer(
    max_epochs=8,
    accelerator="cpu",
    callbacks=[CommunicationLogger()],
    logger=MetricsCSV(folder),
    enable_checkpointing=False,
    enable_progress_bar=False,
    enable_model_summary=False,
)
trainer.fit(module, data)

# %%
# ``D`` counts what is trained, and what is sent.
metrics = fl_lightning.load(folder).metrics
loss = metrics["val/loss"]
trained = len(module.global_vector)
network = sum(parameter.numel() for parameter in learner.parameters())
figure, axes = plt.subplots(figsize=(6, 3.5), layout="constrained")
axes.plot(range(1, 9), loss, "o-", label="test loss")
axes.axhline(5.56, color="gray", ls=":", label="a guess among 259 tokens")
axes.set(title=f"LoRA: {trained:,} of {network:,} numbers are trained", xlabel="round")
axes.set_ylabel("nats per byte")
axes.set_ylim(bottom=0)
axes.legend()
axes.grid(alpha=0.3)
figure.savefig(folder / "loss.png", dpi=150)

print(
    f"Clients train and send {trained:,} of {network:,} numbers, {trained / network:.1%}; the "
    f"test loss falls from {loss[0]:.2f} after one round to {loss[-1]:.2f} nats per byte."
)
