"""
Train on this machine: CUDA, MPS or CPU.

    python train.py                          # the config `small`: minutes on a laptop, no download
    python train.py --resume                 # go on where it stopped, with its own settings
    python train.py --resume --sample="def "   # continue a text; with --best: the best checkpoint
    python train.py --resume --export=DIR    # a folder that transformers reads
    python train.py --name=a,b --plot        # loss.svg of one run, or of several
    python train.py --help                   # every setting
"""
import sys

from config import end, given, leave_on_signals, load_config

if __name__ == "__main__":
    leave_on_signals()      # before torch is imported, which takes seconds

import torch

from model import build_model, export, exported_files, pretrained_config
from trainer import (Text, Trainer, TrainingError, build_data, checkpoints, load_checkpoint,
                     load_model, out_of_memory, plot, print_sample, run_folder, say,
                     tokenizer_files)


def save(model, config):
    """A folder that transformers reads."""
    files = exported_files(model, *tokenizer_files(config), config["model"]["init_from"])
    export(model, config["run"]["export"], files)
    say(f"export   {config['run']['export']}")


def use(argv, config):
    """Sample from the newest or best checkpoint of a run, or export it, without its data."""
    path, state = load_checkpoint(config)
    config = load_config(argv, remembered=state["config"])
    model = build_model({**config["model"], "init_from": ""})
    load_model(model, state, path)
    say(f"notice   {path}, at step {state['step']:,}: no training")
    if "run.sample" in given(argv):
        print_sample(model, config, Text(config), config["sample"]["tokens"])
    if "run.export" in given(argv):
        save(model, config)


def train(argv, config):
    source = config["model"]["init_from"]
    if config["run"]["resume"]:     # its settings and weights are in its checkpoint
        config = load_config(argv, remembered=load_checkpoint(config, check=False)[1]["config"])
        source = ""
    elif source:
        config = load_config(argv, pretrained=pretrained_config(config["model"]))
    torch.manual_seed(config["run"]["seed"])    # the weights
    data = build_data(config)
    model = build_model({**config["model"], "init_from": source})
    if config["run"]["export"]:     # what cannot be exported is said before the training
        exported_files(model, *tokenizer_files(config))
    trainer = Trainer(model, config, *data)
    trainer.train()
    if config["run"]["export"] and not trainer.stop_signal:
        save(model, config)


def main(argv):
    """Returns what went wrong, in one line. A bug keeps its traceback."""
    try:
        config = load_config(argv)
        run = config["run"]
        begun = run["resume"] or run["best"] or checkpoints(run_folder(config))
        if run["plot"]:
            say(f"plot     {plot(config)}")
        elif begun and {"run.sample", "run.export"} & given(argv):
            use(argv, config)
        elif run["best"] and not run["resume"]:
            raise ValueError("--best wants --resume, --sample or --export with it")
        else:
            train(argv, config)
    except KeyboardInterrupt:       # the second signal
        sys.exit("stop     at once: what the newest checkpoint does not hold is lost")
    except (ValueError, OSError, TrainingError) as e:
        return f"error: {e}"
    except (RuntimeError, MemoryError) as e:
        if not out_of_memory(e):
            raise
        return f"error: {out_of_memory(e)}"


if __name__ == "__main__":
    end(main(sys.argv[1:]))
