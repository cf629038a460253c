"""
Train on this machine: CUDA, MPS or CPU.

    python train.py                          # the config `small`: minutes on a laptop, no download
    python train.py --config=small --resume  # go on where it stopped
    python train.py --help                   # every setting
"""
import sys

import torch

from config import load_config
from model import build_model
from trainer import Trainer, TrainingError, build_data, generate


def print_sample(model, config):
    """Continue config.run.sample, as bytes."""
    prompt, vocab_size = config["run"]["sample"].encode(), config["model"]["vocab_size"]
    try:
        if max(prompt) >= vocab_size:
            raise ValueError("the prompt is outside the vocabulary")
        ids = generate(model, list(prompt), 400, config["model"]["block_size"],
                       config["run"]["seed"])
    except Exception as e:  # a model that wants labels, say; the run itself is done and saved
        print(f"notice   no sample: {type(e).__name__}: {e}")
        return
    text = bytes(i for i in ids if i < 256).decode(errors="replace")
    print(f"sample   {'-' * 60}\n{text}\n{'-' * 69}", flush=True)


def main(argv):
    try:
        config = load_config(argv)
        torch.manual_seed(config["run"]["seed"])  # the weights
        data = build_data(config)
        model = build_model(config["model"])
        trainer = Trainer(model, config, *data)
    except (ValueError, OSError, TrainingError) as e:
        # a mistake of the user: one line. Anything else is ours, with its traceback
        return f"error: {e}"
    try:
        trainer.train()
    except TrainingError as e:
        return f"error: {e}"
    if config["run"]["sample"] and not trainer.stop_signal:
        print_sample(model, config)


if __name__ == "__main__":
    sys.stdout.reconfigure(errors="replace")  # a terminal that is not UTF-8
    if message := main(sys.argv[1:]):
        print(message, file=sys.stderr)
        sys.exit(2)
