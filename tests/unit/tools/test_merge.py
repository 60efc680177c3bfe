"""Merged weights are what peft's own functions make of them, and what cannot be merged is refused by name."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import pytest
import torch
from peft import LoraConfig, PeftModel, get_peft_model
from peft.utils import merge_utils
from safetensors.torch import load_file, save_file
from transformers import AutoModelForCausalLM

from app.push.files import read_for_push
from trainers.config.mistakes import ConfigError
from trainers.config.options import EMBEDDED
from trainers.embedded import BASE_DIR
from trainers.run.lineage import read_export
from trainers.run.merging import MergedModel, MergeRequest
from trainers.tools import merge_weights
from trainers.tools.merge import merge
from trainers.tools.merge_adapters import merge_adapters
from trainers.tools.merge_weights import MergedWeight, load_config, seed_of

IDS = torch.arange(3, 40)[None]


def add_tokenizer(folder: Path) -> Path:
    for path in [*BASE_DIR.glob("tokenizer*"), BASE_DIR / "chat_template.jinja"]:
        shutil.copy(path, folder)
    return folder


def full(folder: Path, seed: int, dtype: torch.dtype = torch.float32) -> Path:
    """The embedded model with other weights."""
    model = AutoModelForCausalLM.from_pretrained(BASE_DIR, dtype=dtype)
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for weight in model.parameters():
            weight += (torch.randn(weight.shape, generator=generator) * 0.02).to(dtype)
    model.save_pretrained(folder)
    return add_tokenizer(folder)


def adapter(folder: Path, seed: int, **settings: Any) -> Path:
    """An adapter of the embedded model as peft saves it."""
    chosen = {"r": 4, "lora_alpha": 8, "target_modules": ["q_proj", "v_proj"], "task_type": "CAUSAL_LM", **settings}
    model = get_peft_model(AutoModelForCausalLM.from_pretrained(BASE_DIR), LoraConfig(**chosen))
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for name, weight in model.named_parameters():
            if "lora_" in name:
                weight.copy_(torch.randn(weight.shape, generator=generator) * 0.1)
    model.save_pretrained(folder)
    return folder


@pytest.fixture(scope="module")
def models(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """`h1` and `h2` of full weights in bf16, `a1` and `a2`, adapters of equal ranks, `a3` of another."""
    root = tmp_path_factory.mktemp("models")
    for number in (1, 2):
        full(root / f"h{number}", number, torch.bfloat16)
        adapter(root / f"a{number}", number)
    adapter(root / "a3", 3, r=8, target_modules=["q_proj", "down_proj"], use_rslora=True)
    return root


def request(folders: Sequence[Path], method: str, weights: Sequence[float], **options: Any) -> MergeRequest:
    is_adapter = (folders[0] / "adapter_config.json").is_file()
    parts = [MergedModel(folder.name, str(folder), weight) for folder, weight in zip(folders, weights, strict=True)]
    return MergeRequest(parts, method, is_adapter, **{"base": EMBEDDED, **options})


def merged(work: Path, *args: Any, **options: Any) -> Path:
    work.mkdir(exist_ok=True)
    merge(request(*args, **options), work)
    return work / "result"


def tensors(folder: Path) -> dict[str, torch.Tensor]:
    return {name: value for path in sorted(folder.glob("*.safetensors")) for name, value in load_file(path).items()}


def stored(values: Sequence[torch.Tensor], base: torch.Tensor | None, how: MergeRequest, name: str) -> torch.Tensor:
    """What a weight is merged to."""
    parts = [Held(value) for value in values]
    return MergedWeight(name, parts, None if base is None else Held(base), how, values[0].dtype).mapped()


@dataclass
class Held:
    """A weight in memory where one in a file is expected."""

    value: torch.Tensor

    @property
    def shape(self) -> torch.Size:
        return self.value.shape

    def mapped(self) -> torch.Tensor:
        return self.value

    def read(self, target: torch.Tensor, part: tuple[slice, ...] = ()) -> None:
        target.copy_(self.value[part])


def drawn(count: int, dtype: torch.dtype = torch.float32) -> list[torch.Tensor]:
    generator = torch.Generator().manual_seed(0)
    return [torch.randn(70, 300, generator=generator).to(dtype) for _ in range(count)]


def of_full(method: str, weights: Sequence[float], **options: Any) -> MergeRequest:
    return request([Path(f"f{number}") for number in range(len(weights))], method, weights, **options)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_linear_full_weights_are_the_sum_in_fp64_rounded_once(
    dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(merge_weights, "_CHUNK", 1000)
    values, weights = drawn(3, dtype), [0.3, 0.5, 0.2]
    merged_weight = stored(values, None, of_full("linear", weights), "w")
    exact = sum(value.double() * weight for value, weight in zip(values, weights, strict=True))
    assert isinstance(exact, torch.Tensor)
    assert merged_weight.dtype == dtype
    assert torch.equal(merged_weight, exact.to(dtype))
    in_dtype = sum(value * weight for value, weight in zip(values, weights, strict=True))
    assert not torch.equal(merged_weight, in_dtype), "control: summed in the dtype of the files"  # type: ignore[arg-type]


def test_weights_that_do_not_add_up_to_one_scale_the_differences_from_the_base() -> None:
    first, second, base = drawn(3)
    merged_weight = stored([first, second], base, of_full("linear", [1.0, 1.0]), "w")
    assert torch.equal(merged_weight, (first.double() + second.double() - base.double()).float())
    assert not torch.allclose(merged_weight, first + second), "control: without the base"


@pytest.mark.parametrize("method", ["ties", "dare_linear", "dare_ties"])
def test_differences_of_full_weights_are_merged_by_peft(method: str) -> None:
    first, second, base = drawn(3)
    how = of_full(method, [1.0, 0.5], density=0.4, seed=5)
    merged_weight = stored([first, second], base, how, "layer.weight")
    torch.manual_seed(seed_of(5, "layer.weight"))
    wanted = getattr(merge_utils, method)([first - base, second - base], torch.tensor([1.0, 0.5]), 0.4) + base
    assert torch.equal(merged_weight, wanted)
    assert torch.equal(stored([first, second], base, how, "layer.weight"), merged_weight)
    other = stored([first, second], base, replace(how, seed=6), "layer.weight")
    assert torch.equal(other, merged_weight) == (method == "ties"), "only DARE draws"
    before = torch.get_rng_state()
    stored([first, second], base, how, "layer.weight")
    assert torch.equal(torch.get_rng_state(), before), "the global generator is left as it was"


@pytest.mark.parametrize("bad", [float("nan"), float("-inf")])
@pytest.mark.parametrize("of", [0, 1, 2])
def test_a_value_that_is_not_finite_is_refused_by_its_weight_and_model(bad: float, of: int) -> None:
    values = drawn(3)
    values[of][69, 299] = bad
    owner = ["f0", "f1", "the base model"][of]
    with pytest.raises(ConfigError, match=f"^w of {owner} has values that are not finite"):
        stored(values[:2], values[2], of_full("linear", [1.0, 1.0]), "w")


def test_a_sum_that_does_not_fit_the_dtype_is_refused() -> None:
    values = [torch.full((2, 2), 60000.0, dtype=torch.float16)] * 2
    with pytest.raises(ConfigError, match=r"^w of the result in float16 has values that are not finite"):
        stored(values, torch.zeros(2, 2, dtype=torch.float16), of_full("linear", [1.0, 1.0]), "w")


def test_full_weights_become_a_model_for_stock_transformers(models: Path, tmp_path: Path) -> None:
    folders = [models / "h1", models / "h2"]
    result = merged(tmp_path / "w", folders, "linear", [0.3, 0.7])
    first, second, written = (tensors(folder) for folder in (*folders, result))
    assert written.keys() == first.keys()
    for name, value in written.items():
        assert torch.equal(value, (first[name].double() * 0.3 + second[name].double() * 0.7).to(torch.bfloat16)), name
    record = json.loads((result / "tunesmith.json").read_text())
    assert record["checked"] == "passed"
    assert record["config"]["model_name_or_path"] == EMBEDDED
    assert AutoModelForCausalLM.from_pretrained(result).dtype == torch.bfloat16


@pytest.mark.long
def test_ties_of_full_weights_are_peft_s_of_every_weight(models: Path, tmp_path: Path) -> None:
    folders, options = [models / "h1", models / "h2"], {"density": 0.4, "needs_base": True, "dtype": "float32"}
    result = tensors(merged(tmp_path / "w", folders, "ties", [1.0, 0.5], **options))
    base, every = tensors(BASE_DIR), [tensors(folder) for folder in folders]
    for name, value in result.items():
        differences = [each[name].float() - base[name].float() for each in every]
        wanted = merge_utils.ties(differences, torch.tensor([1.0, 0.5]), 0.4) + base[name].float()
        assert torch.equal(value, wanted), name


@torch.no_grad()
def logits_of(model: Any) -> torch.Tensor:
    return model.eval()(IDS).logits  # type: ignore[no-any-return]


@torch.no_grad()
def summed(folders: Sequence[Path], weights: Sequence[float]) -> Any:
    """The embedded model plus the weighted sum of the updates, computed from the files."""
    model = AutoModelForCausalLM.from_pretrained(BASE_DIR)
    parameters = dict(model.named_parameters())
    for folder, weight in zip(folders, weights, strict=True):
        settings, factors = json.loads((folder / "adapter_config.json").read_text()), tensors(folder)
        scale = settings["lora_alpha"] / (settings["r"] ** (0.5 if settings["use_rslora"] else 1))
        for name in [name for name in factors if "lora_A" in name]:
            target = name.removeprefix("base_model.model.").replace("lora_A.weight", "weight")
            parameters[target] += weight * scale * factors[name.replace("lora_A", "lora_B")] @ factors[name]
    return model


def test_cat_is_the_exact_sum_of_the_updates_in_stock_peft(models: Path, tmp_path: Path) -> None:
    """With other ranks, other modules and rsLoRA, whose scale peft would apply to the result once more."""
    folders, weights = [models / "a1", models / "a3"], [0.5, -0.25]
    result = merged(tmp_path / "w", folders, "cat", weights)
    assert json.loads((result / "adapter_config.json").read_text())["r"] == 12
    loaded = logits_of(PeftModel.from_pretrained(AutoModelForCausalLM.from_pretrained(BASE_DIR), str(result)))
    torch.testing.assert_close(loaded, logits_of(summed(folders, weights)), rtol=1e-4, atol=1e-4)
    stock = PeftModel.from_pretrained(AutoModelForCausalLM.from_pretrained(BASE_DIR), str(folders[1]), "one")
    stock.load_adapter(str(folders[0]), "two")
    stock.add_weighted_adapter(["one", "two"], [-0.25, 0.5], "sum", combination_type="cat")
    stock.set_adapter("sum")
    assert (logits_of(stock) - loaded).abs().max() > 1e-2, "control: peft alone, the rsLoRA adapter first"


@pytest.mark.parametrize(
    ("method", "options"),
    [("svd", {"rank": 3}),
     *(pytest.param(method, {"density": 0.5}, marks=pytest.mark.long)
       for method in ("ties", "dare_linear", "dare_ties_svd")),
     pytest.param("linear", {}, marks=pytest.mark.long)],
)  # fmt: skip
def test_adapters_are_merged_by_peft(method: str, options: dict[str, Any], models: Path, tmp_path: Path) -> None:
    """Its factors, bit for bit, those of the same call on the real base; of an SVD, their product."""
    folders, weights = [models / "a1", models / "a2"], [0.5, 0.25]
    config = load_config(BASE_DIR, "sft")
    folder, _, deviation = merge_adapters(request(folders, method, weights, seed=3, **options), config, tmp_path)
    stock = PeftModel.from_pretrained(AutoModelForCausalLM.from_pretrained(BASE_DIR), str(folders[0]), "one")
    stock.load_adapter(str(folders[1]), "two")
    torch.manual_seed(3)
    stock.add_weighted_adapter(["one", "two"], weights, "sum", combination_type=method,
                               svd_rank=options.get("rank"), density=options.get("density"))  # fmt: skip
    result, first, second = (tensors(each) for each in (folder, *folders))
    total = apart = 0.0
    for name in [name for name in result if "lora_A" in name]:
        other, path = name.replace("lora_A", "lora_B"), name.replace(".lora_A.weight", "")
        layer = stock.get_submodule(path)
        a, b = layer.lora_A["sum"].weight, layer.lora_B["sum"].weight
        if "svd" in method:
            torch.testing.assert_close(result[other] @ result[name], (b @ a).detach(), rtol=1e-4, atol=1e-5)
        else:
            assert torch.equal(result[name], a), name
            assert torch.equal(result[other], b), name
        exact = first[other] @ first[name] + 0.5 * second[other] @ second[name]  # half of the scale of 8/4
        total += float(exact.norm() ** 2)
        apart += float((result[other] @ result[name] - exact).norm() ** 2)
    assert apart / total > 0.01, "control: it is not simply the sum"
    if method in ("linear", "svd"):
        assert deviation == pytest.approx((apart / total) ** 0.5, rel=1e-4)
    else:
        assert deviation is None


@pytest.mark.long
def test_the_result_says_how_it_was_merged(models: Path, tmp_path: Path) -> None:
    result = merged(tmp_path / "w", [models / "a1", models / "a2"], "dare_linear_svd", [0.5, 0.5], density=0.5, seed=9,
                    title="both", command=["tunesmith", "merge", "/secret/place/a1", "a2"])  # fmt: skip
    record = json.loads((result / "tunesmith.json").read_text())
    assert record["merge"]["seed"] == 9
    assert [model["name"] for model in record["merge"]["models"]] == ["a1", "a2"]
    assert all(len(digest) == 64 for model in record["merge"]["models"] for digest in model["files"].values())
    assert record["checked"] == "passed"
    assert str(read_export(result)[1][0]) == "both (a merge of a1 + a2, method=dare_linear_svd)"
    card = (result / "README.md").read_text()
    assert "merged with Tunesmith from those of 2 models, by the method `dare_linear_svd`" in card
    assert "/secret" not in card
    assert "density 0.5, seed 9, rank 4" in card
    assert "adapter_model.safetensors" in read_for_push(result).files


def changed(folder: Path, source: Path, file: str, **values: Any) -> Path:
    """A copy of a model with other values in a JSON file."""
    shutil.copytree(source, folder)
    path = folder / file
    path.write_text(json.dumps(json.loads(path.read_text()) | values))
    return folder


def spoiled(folder: Path, source: Path, value: float) -> Path:
    """A copy of a model with one other value."""
    shutil.copytree(source, folder)
    path = next(folder.glob("*.safetensors"))
    content = load_file(path)
    name = sorted(content)[0]
    content[name].view(-1)[0] = value
    save_file(content, path, {"format": "pt"})
    return folder


@pytest.mark.parametrize(
    ("change", "message"),
    [(lambda tensors: {name: value for name, value in tensors.items() if ".layers.0." not in name}, "layers.0"),
     (lambda tensors: {name.replace(".layers.", ".h."): value for name, value in tensors.items()}, "model.h.0")],
)  # fmt: skip
def test_an_adapter_that_does_not_fit_the_base_is_refused(
    change: Callable[[dict[str, torch.Tensor]], dict[str, torch.Tensor]], message: str, models: Path, tmp_path: Path
) -> None:
    """peft only warns about missing and unknown tensors, and would merge zeros for them."""
    shutil.copytree(models / "a2", tmp_path / "other")
    path = tmp_path / "other" / "adapter_model.safetensors"
    save_file(change(load_file(path)), path, {"format": "pt"})
    config = load_config(BASE_DIR, "sft")
    for folders in ([models / "a1", tmp_path / "other"], [tmp_path / "other", models / "a1"]):
        with pytest.raises(ConfigError, match=f"^other does not fit the base model: .*{message}"):
            merge_adapters(request(folders, "cat", [0.5, 0.5]), config, tmp_path / "out")
    assert not (tmp_path / "out").exists()


def test_adapters_that_leave_out_the_same_modules_are_merged(tmp_path: Path) -> None:
    """As those of models of images and text do, whose towers no text reaches; in any order."""
    every = ["model.layers.0.self_attn.q_proj", "model.layers.0.self_attn.v_proj"]
    folders = [adapter(tmp_path / "first", 1, exclude_modules=every)]
    folders.append(adapter(tmp_path / "second", 2, exclude_modules=every[::-1]))
    config = load_config(BASE_DIR, "sft")
    folder, _, deviation = merge_adapters(request(folders, "cat", [0.5, 0.5]), config, tmp_path / "out")
    assert deviation is not None
    assert deviation < 1e-6
    assert set(json.loads((folder / "adapter_config.json").read_text())["exclude_modules"]) == set(every)
    for changes in ({}, {"exclude_modules": every[:1]}):
        other = adapter(tmp_path / f"other-{len(changes)}", 2, **changes)
        with pytest.raises(ConfigError, match=r"leave out different modules .* `tunesmith export RUN --merged`"):
            merge_adapters(request([folders[0], other], "cat", [0.5, 0.5]), config, tmp_path / "bad")
    assert not (tmp_path / "bad").exists()


@pytest.mark.long
def test_what_cannot_be_merged_is_refused_by_name(models: Path, tmp_path: Path) -> None:
    cases = [
        ([models / "h1", spoiled(tmp_path / "nan", models / "h2", float("nan"))], "linear", "of nan has .* not finite"),
        ([models / "a1", spoiled(tmp_path / "inf", models / "a2", float("inf"))], "cat", r"of inf has .* not finite"),
        ([models / "a1", models / "a3"], "linear", r"needs equal ranks.* rank 4 in a1, 8 in a3; use --method cat"),
        ([models / "h1", changed(tmp_path / "eps", models / "h2", "config.json", rms_norm_eps=0.5)], "linear",
         r"eps has rms_norm_eps=0.5 in its config.json, and h1 has"),
        ([models / "h1", changed(tmp_path / "wide", models / "h2", "config.json", tie_word_embeddings=False)], "linear",
         "tie_word_embeddings=False"),
        ([models / "a1", adapter(tmp_path / "dora", 4, use_dora=True)], "cat", "dora has use_dora=True"),
        ([models / "a1", adapter(tmp_path / "saved", 4, modules_to_save=["lm_head"])], "cat",
         r"saved has modules_to_save=.* `tunesmith export RUN --merged`"),
        ([models / "a1", models / "a2"], "svd", "rank=4096 is larger than"),
    ]  # fmt: skip
    for number, (folders, method, message) in enumerate(cases):
        work = tmp_path / f"w{number}"
        work.mkdir()
        with pytest.raises(ConfigError, match=message):
            merge(request(folders, method, [0.5, 0.5], rank=4096 if method == "svd" else None), work)
        assert not (work / "result").exists()
    (tmp_path / "nan" / "chat_template.jinja").write_text("{{ messages[0].content }}")
    with pytest.raises(ConfigError, match="nan has another chat template than h1"):
        merge(request([models / "h1", tmp_path / "nan"], "linear", [0.5, 0.5]), tmp_path)
