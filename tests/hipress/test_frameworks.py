"""The scripts of docs/use/frameworks.md train, save and resume under each framework; the files of
their ranks."""

import importlib.util
import re
from pathlib import Path

import pytest

from tests.hipress import framework_ranks
from tests.hipress.launch import launch
from tests.walkthrough import BLOCK, follow, run, write

TEXT = (Path(__file__).parents[2] / "docs" / "use" / "frameworks.md").read_text("utf-8")
SECTIONS = dict(re.findall(r"^## (\w+)\n(.*?)(?=^## |\Z)", TEXT, re.DOTALL | re.MULTILINE))


@pytest.mark.slow
@pytest.mark.parametrize("framework", SECTIONS)
def test_its_script_trains_and_goes_on(framework, tmp_path, monkeypatch):
    package = "torch" if framework == "FSDP2" else framework.lower()
    if importlib.util.find_spec(package) is None:
        pytest.skip(f"{framework} is not installed")
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    assert len(follow(SECTIONS[framework], tmp_path, errors=False)) == 2
    for rank in range(2):
        assert list(tmp_path.rglob(f"hipress*-{rank}.pt"))


@pytest.mark.slow
@pytest.mark.parametrize("framework", SECTIONS)
def test_its_script_trains_with_one_process(framework, tmp_path, monkeypatch):
    package = "torch" if framework == "FSDP2" else framework.lower()
    if importlib.util.find_spec(package) is None:
        pytest.skip(f"{framework} is not installed")
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    ((kind, script),) = [each for each in BLOCK.findall(SECTIONS[framework]) if each[0] == "python"]
    write(kind, script, tmp_path)
    start = "python" if framework == "Lightning" else "torchrun --nproc-per-node 1"
    done = run(f"{start} with_{framework.lower()}.py alone", tmp_path)
    assert done.returncode == 0, done.stderr
    assert "step " in done.stdout


@pytest.mark.parametrize(
    "case, kinds, told",
    [
        ("kept", ["", ""], ""),
        ("missing", ["", ""], ""),
        ("damaged", ["ConfigMismatch", "StateError"], "cannot be read"),
        ("no folder", ["ConfigMismatch", "ConfigMismatch"], "training resumes"),
    ],
)
def test_all_ranks_resume_or_none(case, kinds, told, tmp_path):
    """A rank without its file trained on alone, and the others waited for it."""
    found = launch(framework_ranks.resumes_by_accelerate, 2, str(tmp_path), case)
    assert [error.partition(":")[0] for error, _ in found] == kinds
    assert all(told in error for error, _ in found)
    assert [had for _, had in found] == [case == "kept"] * 2
    assert not (tmp_path / "detached").exists()


def test_a_full_disk_leaves_the_last_state_and_names_rank_and_file(tmp_path):
    for rank, (error, there, loads) in enumerate(
        launch(framework_ranks.without_room, 2, str(tmp_path))
    ):
        assert error.kind == "HipressError"
        assert f"rank {rank}: " in error.message
        assert f"{tmp_path}/hipress-{rank}.pt (File too large)" in error.message
        assert there == ["hipress-0.pt", "hipress-1.pt"]
        assert loads


def test_a_compiled_model_of_accelerate_is_compressed():
    assert launch(framework_ranks.compiled, 2) == [True, True]


def imported(framework):
    """Import a framework, or skip the test without it."""
    return pytest.importorskip(framework, exc_type=ImportError)


@pytest.mark.slow
def test_models_that_are_not_prepared_for_ddp_are_refused():
    """They trained without a word, uncompressed."""
    imported("lightning"), imported("transformers")
    for found in launch(framework_ranks.not_prepared, 2):
        assert [each.kind for each in found] == ["ConfigError"] * 3
        for each, advice in zip(found, ("accelerator.prepare", "DDPStrategy", "fsdp"), strict=True):
            assert advice in each.message


@pytest.mark.slow
def test_trainings_by_transformers_in_one_folder_have_files_of_their_own(tmp_path):
    imported("transformers")
    for there, again in launch(framework_ranks.trained_elsewhere, 2, str(tmp_path)):
        assert len(there) == 4
        assert again == [True, False]


LIGHTNING = """
import glob

import lightning
import torch
from lightning.pytorch.callbacks import ModelCheckpoint

from hipress.integrations import files
from hipress.integrations.lightning import HiPress

def told(ddp, file, load=files.load):
    print(f"loads {file.name} {file.exists()}\\n", end="", flush=True)
    load(ddp, file)

class Model(lightning.LightningModule):
    def __init__(self):
        super().__init__()
        self.layer = torch.nn.Linear(64, 10)

    def training_step(self, batch, index):
        return self.layer(batch[0]).square().mean()

    def configure_optimizers(self):
        return torch.optim.SGD(self.parameters(), 0.1)

def trainer_of(name, epochs):
    return lightning.Trainer(
        accelerator="cpu", devices=2, strategy="ddp", max_epochs=epochs, logger=False,
        enable_progress_bar=False, enable_model_summary=False,
        callbacks=[HiPress("onebit_group", min_size=0), ModelCheckpoint(name, save_last=True)],
    )

def fit(trainer, path=None):
    data = torch.utils.data.TensorDataset(torch.randn(64, 64))
    trainer.fit(Model(), torch.utils.data.DataLoader(data, batch_size=8), ckpt_path=path)
    trainer.strategy.barrier()
    if trainer.is_global_zero:
        print("files", *sorted(glob.glob("hipress*", root_dir="same")), flush=True)
    trainer.strategy.barrier()

files.load = told
fit(trainer_of("same", 3))
fit(trainer_of("same", 3))
again = trainer_of("same", 4)
fit(again, "same/last.ckpt")
again.fit_loop.max_epochs = 5
fit(again)
torch.distributed.destroy_process_group()
"""


@pytest.mark.slow
def test_files_of_lightning_belong_to_their_checkpoints(tmp_path):
    """Trainings in one folder shared those of a step, which stayed for ever; a later `fit` loaded
    the earlier one's."""
    imported("lightning")
    (tmp_path / "fits.py").write_text(LIGHTNING)
    done = run("torchrun --nproc-per-node 2 fits.py", tmp_path)
    assert done.returncode == 0, done.stderr
    found = [line.split() for line in re.findall("^files (.*)", done.stdout, re.MULTILINE)]
    steps = [sorted(int(each.split("-")[2]) for each in there) for there in found]
    # the second training's checkpoints lie beside the first's, which the third goes on with
    assert steps == [[12, 12], [12] * 4, [12, 12, 16, 16], [12, 12, 20, 20]]
    loads = sorted(re.findall("^loads (.*)$", done.stdout, re.MULTILINE))
    assert loads == [f"{each} True" for each in found[0]]
