"""The base model and its tokenizer: built in, from a folder, or from the Hub, through transformers' Auto classes; and its head.

The head is what trains in full beside the adapter: the parameters outside the base model, or newly initialised on loading. It
starts from random numbers, or from descriptions of the classes.
"""

from __future__ import annotations

import hashlib
from collections.abc import Container, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from logging import getLogger
from pathlib import Path
from typing import TYPE_CHECKING, Any
from unicodedata import normalize

import torch
from safetensors import SafetensorError
from torch import Tensor, nn

from secure_fed.activity import activity
from secure_fed.config import ModelConfig
from secure_fed.errors import ConfigError, MethodError, ModelError
from secure_fed.learning.models import devices, quantised
from secure_fed.learning.models.architecture import of_text, positions_of
from secure_fed.learning.models.locate import found
from secure_fed.learning.models.matrix_products import hasten
from secure_fed.learning.tasks.task import Task

if TYPE_CHECKING:
    from secure_fed.learning.models.mean_pooled import MeanPooledForSequenceClassification


@dataclass(frozen=True)
class Loaded:
    """A model ready to be adapted.

    head: the parameters without pre-training: outside the base model, or newly initialised on loading. They train and are sent
    with the adapter. fixed: these parameters, in place of `head`, if `model.train_head` is false.
    """

    model: nn.Module
    tokenizer: Any
    head: tuple[str, ...]
    fixed: tuple[str, ...] = ()


def load(config: ModelConfig, task: Task, label_names: Sequence[str], seed: int, *, shapes: bool = False) -> Loaded:
    """The model with the task's head; newly initialised parameters depend on `seed` alone.

    If a head was pre-trained for the task, such as a language model's, only its new parameters count as head.
    shapes: on the meta device, which has shapes and no numbers; a folder then needs no weights.
    """
    with activity(f"loading the model {config.name}" if not shapes else f"reading the shapes of {config.name}"):
        return _loaded(config, task, label_names, seed, shapes=shapes)


def _loaded(config: ModelConfig, task: Task, label_names: Sequence[str], seed: int, *, shapes: bool) -> Loaded:
    import transformers

    place, chosen = found(config)
    device, divided = devices.find_devices(config.device)[0], bool(config.device_map) and not shapes
    with quiet(), explained(config.name), seeded_weights(seed, everywhere=divided), torch.device("cpu"):
        tokenizer = transformers.AutoTokenizer.from_pretrained(place, **chosen)
        made = _class(config, task)
        skeleton = _without_values(made, place, chosen) if divided or config.quantization != "none" else None
        chosen |= quantised.settings(config, device, _kept_whole(skeleton))
        if divided:
            folder = devices.Folder()
            unstored = [] if skeleton is None or task.keeps_head else _modules(skeleton)
            of_values = None if "quantization_config" in chosen else skeleton
            chosen |= devices.device_map_settings(config, of_values, unstored, folder)
        chosen |= {"dtype": getattr(torch, config.dtype)}
        model, head_in_order = _pretrained(config, task, label_names, place, chosen, shapes=shapes)
        if divided:
            devices.adopt(model, folder)
            device = devices.device_of(model)
    _check_positions(config, model)
    _give_padding(model, tokenizer)
    _check_token_ids(config.name, model, tokenizer)
    task.prepare(tokenizer)
    if divided:
        four = {"input_ids": torch.zeros(1, 4, dtype=torch.long, device=device)}
        four["attention_mask"] = torch.ones_like(four["input_ids"])
        devices.require_called(model, type(model).__name__, lambda: model(**four)[0])
    if task.auto == "AutoModelForCausalLM":
        # A column that is an outlier in a later token has another precision in the earlier ones too.
        tried = not shapes and not quantised.couples_rows(model)
        _require_causal(config.name, model) if tried else require_decoder(config.name, model.config)
    if config.descriptions and not shapes:
        start_from_descriptions(model, tokenizer, config, label_names)
    if config.quantization == "none" and not divided:
        model.to("meta" if shapes else device)
    elif config.quantization != "none" and not quantised.layers(model):
        raise ModelError(
            f"model.quantization is {config.quantization!r}, and {config.name!r} has no linear layer to quantise: leave it out"
        ).about("model.quantization", config.quantization, "none for this model")
    if config.quantization != "none" and not shapes and not divided:
        quantised.leave_the_file(model)
    if device.type == "cpu" and config.dtype == "bfloat16":
        # The derivative of torch's fused attention takes ten times as long there.
        model.set_attn_implementation("eager")
    hasten(model)
    return Loaded(model, tokenizer, head_in_order) if config.train_head else Loaded(model, tokenizer, (), head_in_order)


def outline(config: ModelConfig, task: Task, label_names: Sequence[str]) -> tuple[Any, tuple[str, ...]]:
    """The configuration of the model that `load` makes, and its head's names, from the checkpoint's names and shapes alone.

    Quantised layers have their usual form, so `model.quantization` needs no bitsandbytes here.
    """
    place, chosen = found(replace(config, quantization="none", device_map="", max_memory=()))
    with activity(f"reading the shapes of {config.name}"), quiet(), explained(config.name):
        model, head = _pretrained(config, task, label_names, place, chosen, shapes=True)
    return model.config, head


def _class(config: ModelConfig, task: Task) -> Any:
    import transformers

    from secure_fed.learning.models.mean_pooled import MeanPooledForSequenceClassification

    return MeanPooledForSequenceClassification if config.pooling == "mean" else getattr(transformers, task.auto)


def _pretrained(
    config: ModelConfig, task: Task, label_names: Sequence[str], place: str, chosen: Mapping[str, Any], *, shapes: bool
) -> tuple[Any, tuple[str, ...]]:
    """The task's model from a checkpoint, and the names of its parameters without pre-training. shapes: as in `load`."""
    read = _shapes if shapes else _checkpoint
    model, info = read(_class(config, task), place, {**chosen, **task.model_settings(label_names)})
    new = {*info["missing_keys"], *(key[0] for key in info["mismatched_keys"])}
    head = new if task.keeps_head else {*head_names(model), *new}
    names = [name for name, _ in model.named_parameters()]
    if head.issuperset(names):  # weights under other names than the architecture's are skipped on loading
        raise _none_loaded(config.name, model, names, info["unexpected_keys"])
    return model, tuple(name for name in names if name in head)


def _none_loaded(name: str, model: Any, wanted: Container[str], stored: Iterable[str]) -> ModelError:
    """Why no weight of the base model was loaded: this architecture names it differently, or it is another architecture.

    For instance, transformers' LlamaForQuestionAnswering has its base under `transformer.`, every other Llama under `model.`.
    """
    kind, prefix = type(model).__name__, model.base_model_prefix
    for key in stored:
        root, _, rest = key.partition(".")
        if f"{prefix}.{rest}" in wanted:
            return ModelError(
                f"model.name is {name!r}, whose weights are under '{root}.', and transformers' {kind} loads those under "
                f"'{prefix}.' alone, so none of them; set model.name to a model of another architecture"
            )
    return ModelError(
        f"model.name is {name!r}, but its weights hold no part of a {kind}; its config.json is another model's"
    )


def _checkpoint(made: Any, place: str, chosen: Mapping[str, Any]) -> tuple[Any, dict[str, Any]]:
    found: tuple[Any, dict[str, Any]] = made.from_pretrained(
        place, ignore_mismatched_sizes=True, output_loading_info=True, **chosen
    )
    return found


def _shapes(made: Any, place: str, chosen: Mapping[str, Any]) -> tuple[Any, dict[str, Any]]:
    """The same on the meta device. In a folder without weights, what a usual checkpoint lacks counts as missing."""
    import transformers

    from secure_fed.learning.models import mean_pooled

    quantization = chosen.get("quantization_config")
    chosen = {name: value for name, value in chosen.items() if name not in ("quantization_config", "device_map")}
    if not has_weights(place):
        own = {name: chosen.pop(name) for name in ("dtype", "trust_remote_code") if name in chosen}
        base = transformers.AutoConfig.from_pretrained(place, trust_remote_code=own["trust_remote_code"], **chosen)
        if made is mean_pooled.MeanPooledForSequenceClassification:
            made, classes = transformers.AutoModelForSequenceClassification, (base.id2label, base.label2id)
            base = mean_pooled.MeanPooledConfig(base, id2label=classes[0], label2id=classes[1])
        with torch.device("meta"):
            model = made.from_config(base, **own)
        info: dict[str, Any] = {"missing_keys": pooler_names(model), "mismatched_keys": (), "unexpected_keys": ()}
    else:
        model, info = _checkpoint(made, place, chosen | {"device_map": {"": "meta"}})
    if quantization is not None:
        from transformers.integrations.bitsandbytes import replace_with_bnb_linear

        whole = quantization.llm_int8_skip_modules or []
        model = replace_with_bnb_linear(model, modules_to_not_convert=whole, quantization_config=quantization)
    return model, info


def has_weights(place: str) -> bool:
    """Whether weights are stored in this folder; a name on the Hub is taken to have some."""
    folder = Path(place)
    return not folder.is_dir() or any(any(folder.glob(f"*.{ending}")) for ending in ("safetensors", "bin"))


def _without_values(made: Any, place: str, chosen: dict[str, Any]) -> Any:
    """The model on the meta device; None with a head of ours, which is put on a base model that is loaded by itself."""
    import transformers

    if not hasattr(made, "from_config"):
        return None
    with torch.device("meta"):
        return made.from_config(
            transformers.AutoConfig.from_pretrained(place, **chosen), trust_remote_code=chosen["trust_remote_code"]
        )


def _modules(model: nn.Module) -> list[str]:
    """The modules with new parameters: head and pooler."""
    return list(dict.fromkeys(name.rpartition(".")[0] for name in (*head_names(model), *pooler_names(model))))


def _kept_whole(model: Any) -> list[str]:
    """The modules that train or give scores, which are not quantised: head, pooler and output layer."""
    if model is None:
        return []
    output, modules = model.get_output_embeddings(), _modules(model)
    return [*modules, *(name for name, one in model.named_modules() if one is output and name not in modules)]


@contextmanager
def seeded_weights(seed: int, *, everywhere: bool) -> Iterator[None]:
    """Within the block, new weights depend on `seed` alone, on the CPU or `everywhere`. Afterwards generators are restored."""
    there = list(range(torch.cuda.device_count())) if everywhere else []
    with torch.random.fork_rng(devices=there):
        torch.default_generator.manual_seed(seed)
        for device in there:
            torch.cuda.default_generators[device].manual_seed(seed)
        yield


def require_decoder(name: str, config: Any) -> None:
    """Refuse an encoder by its configuration alone, where `_require_causal` cannot try it."""
    from transformers.models.auto.modeling_auto import MODEL_FOR_MASKED_LM_MAPPING_NAMES as MASKED

    kind = of_text(config)
    if kind.model_type in MASKED and not getattr(kind, "is_decoder", False):
        raise _reads_later(name, f"{kind.model_type} model")


@torch.no_grad()
def _require_causal(name: str, model: Any) -> None:
    """Refuse an encoder: it reads the tokens that it has to predict, so its likelihoods would mean nothing."""
    model.eval()
    ids = torch.arange(4, device=devices.device_of(model)).view(1, 4) % model.config.vocab_size
    other = ids.clone()
    other[0, -1] = (other[0, -1] + 1) % model.config.vocab_size
    first, second = (
        model(input_ids=given, attention_mask=torch.ones_like(given)).logits[0, :-1] for given in (ids, other)
    )
    rounding = 100 * torch.finfo(first.dtype).eps * float(first.abs().max())
    if float((first - second).abs().max()) > rounding:
        raise _reads_later(name, type(model).__name__)


def _reads_later(name: str, kind: str) -> ModelError:
    return ModelError(
        f"model.name is {name!r}, whose {kind} reads later tokens and so cannot predict them; "
        "choose a decoder such as GPT-2 or LLaMA"
    ).about("model.name", name, "a decoder")


def _check_positions(config: ModelConfig, model: nn.Module) -> None:
    """Refuse texts with more tokens than positions: learned positions end there, others were not trained beyond."""
    limit = positions_of(model)
    if limit is not None and limit < config.max_length:
        raise ConfigError(
            f"model.max_length is {config.max_length}, more than the {limit} positions of {config.name!r}; "
            f"set model.max_length to at most {limit}"
        ).about("model.max_length", config.max_length, f"at most {limit}")


def _give_padding(model: Any, tokenizer: Any) -> None:
    """Decoders often have no padding token: their end-of-text token is used, since the mask hides it.

    A decoder classifies by the last token that its configuration does not call padding, so both need the same padding token.
    """
    if tokenizer.pad_token_id is None:
        if tokenizer.eos_token_id is None:
            raise ModelError(
                f"the tokenizer of model.name {tokenizer.name_or_path!r} has neither a padding nor an end token"
            )
        tokenizer.pad_token = tokenizer.eos_token
    model.config.pad_token_id = tokenizer.pad_token_id


def _check_token_ids(name: str, model: Any, tokenizer: Any) -> None:
    """Refuse a tokenizer that can give an id without an embedding: training would stop at the first text with one."""
    try:
        table = model.get_input_embeddings()
    except NotImplementedError:  # a model that hashes characters has no table
        return
    largest, token = max((number, token) for token, number in tokenizer.get_vocab().items())
    if isinstance(table, nn.Embedding) and largest >= table.num_embeddings:
        raise ModelError(
            f"the tokenizer of model.name {name!r} has {token!r} as token {largest}, and the model has embeddings of tokens "
            f"below {table.num_embeddings}: save it after model.resize_token_embeddings({largest + 1}), or set model.name to "
            "one with its own tokenizer"
        )


def head_names(model: nn.Module) -> tuple[str, ...]:
    """Parameters outside the base model, for models that declare their base model (as transformers' do)."""
    prefix = getattr(model, "base_model_prefix", "")
    if not prefix or not hasattr(model, prefix):
        return ()
    return tuple(name for name, _ in model.named_parameters() if not name.startswith(prefix + "."))


def pooler_names(model: nn.Module) -> tuple[str, ...]:
    """The parameters of the base model's pooler: new in every classifier made from a masked language model, and trained
    for another task in the rest."""
    pooler = f"{getattr(model, 'base_model_prefix', '')}.pooler."
    return tuple(name for name, _ in model.named_parameters() if name.startswith(pooler))


def task_head(model: nn.Module) -> tuple[str, ...]:
    """The head of a model that was made elsewhere: the parameters outside its base model, and its pooler.

    A language model has none. The layers that score its tokens (`get_output_embeddings`) were pre-trained with it, and are as
    large as its embeddings.
    """
    return () if scores_tokens(model) else head_names(model) + pooler_names(model)


def scores_tokens(model: Any) -> bool:
    """Whether this is a language model, whose output layer scores tokens."""
    return getattr(model, "get_output_embeddings", lambda: None)() is not None


def last_layer(model: nn.Module) -> tuple[str, ...]:
    """The parameters of the last module outside the base model, which computes the scores; empty if there is none."""
    outside = head_names(model)
    return tuple(name for name in outside if name.rpartition(".")[0] == outside[-1].rpartition(".")[0])


def head_of(model: nn.Module, found: Sequence[str], modules: Sequence[str]) -> tuple[str, ...]:
    """The parameters that train in full: the head in `found`, and the named `modules`."""
    names = [name for name, _ in model.named_parameters()]
    places = dict(model.named_parameters(remove_duplicate=False))
    for module in modules:
        inside = [name for name in places if _inside(name, module)]
        if not inside:
            some = ", ".join(name for name, _ in list(model.named_children())[:5])
            raise MethodError(
                f"method.modules_to_save names {module!r}, but the model has no such module with parameters; "
                f"it has {some}, ..."
            ).about("method.modules_to_save", module, "a module with parameters")
        for name in inside:
            first = next(other for other in names if places[other] is places[name])
            if first != name:
                raise MethodError(
                    f"method.modules_to_save names {module!r}, whose {name} is {first} too: "
                    f"leave it out, or name {first.rpartition('.')[0]!r}, which trains both"
                ).about("method.modules_to_save", module, "a module whose weights are its own")
    return tuple(name for name in names if name in found or any(_inside(name, module) for module in modules))


def _inside(parameter: str, module: str) -> bool:
    """Whether a parameter belongs to the module with this name, or ending of a name, as PEFT matches names."""
    owner = f".{parameter}".rpartition(".")[0] + "."
    return f".{module}." in owner


@torch.no_grad()
def start_from_descriptions(
    model: MeanPooledForSequenceClassification, tokenizer: Any, config: ModelConfig, label_names: Sequence[str]
) -> None:
    """Set the head of a model that reads the mean over tokens from `config.descriptions`, cut like every text.

        w_c = 20 / r (u_c - u),    b = 0

    m_c is the vector that the head reads of the description of class c, r the mean length of all m_c, u_c = m_c / |m_c|, and u
    the mean of all u_c, whose subtraction changes no probability and keeps the weights small. So a text scores highest for the
    class whose description is most similar to it, by cosine. 20 is the factor with which sentence encoders are usually trained
    on cosines. Descriptions are public, like the names of the classes, so they cost no privacy.
    """
    texts = descriptions_in_order(config.descriptions, label_names)
    inputs = tokenizer(texts, return_tensors="pt", padding=True, truncation=True, max_length=config.max_length)
    model.classifier.weight.copy_(description_rows(model.read(**inputs.to(devices.device_of(model)))[0]))
    model.classifier.bias.zero_()


def description_rows(read: Tensor) -> Tensor:
    """(classes, d) w, from what the head reads of each description, (classes, d)."""
    units = torch.nn.functional.normalize(read, dim=1)
    found: Tensor = 20.0 / read.norm(dim=1).mean() * (units - units.mean(0))
    return found


def descriptions_in_order(descriptions: Sequence[str], names: Sequence[str]) -> list[str]:
    """The descriptions, each "class=description", in the order of the classes; ConfigError unless each class has one."""
    found: dict[str, str] = {}
    for one in descriptions:
        name, text = (normalize("NFC", part.strip()) for part in one.partition("=")[::2])
        if name not in names or name in found or not text:
            raise ConfigError(
                f"model.descriptions has {one!r:.100}; give one 'class=description' for each class: {', '.join(names):.200}"
            ).about("model.descriptions", one, "class=description, once for each class")
        found[name] = text
    if missing := ", ".join(name for name in names if name not in found):
        said = f"model.descriptions has none for {missing:.200}; give one for each class"
        raise ConfigError(said).about("model.descriptions", tuple(descriptions), "one for each class")
    return [found[name] for name in names]


def digest_of(model: nn.Module, but: Container[str]) -> str:
    """A digest by which a resumed run, and an exported adapter, recognise their base model.

    SHA-256 over the name, type, shape and bits of every parameter that `but` does not name. On the meta device
    there are no bits.
    """
    digest = hashlib.sha256()
    values, beside = devices.Values(model), quantised.scales(model)
    for name in sorted({*values, *beside} - {name for name in values if name in but}):
        parameter = values[name] if name in values else beside[name]
        digest.update(f"{name} {parameter.dtype} {tuple(parameter.shape)}".encode())
        if not parameter.is_meta:
            digest.update(parameter.detach().cpu().contiguous().reshape(-1).view(torch.uint8).numpy().tobytes())
    return digest.hexdigest()


@contextmanager
def explained(name: str) -> Iterator[None]:
    """Errors of transformers about a model that cannot be loaded, as one sentence."""
    try:
        yield
    except (OSError, ValueError, KeyError, TypeError, RuntimeError, ImportError, SafetensorError) as error:
        if "trust_remote_code" in str(error):
            raise ModelError(
                f"model.name is {name!r}, which brings code of its own along, and model.trust_remote_code is false: read the "
                "code, and set it to true if you trust it"
            ).about("model.trust_remote_code", False, "true, to run the model's own code") from error
        first = str(error).strip().splitlines()[0].rstrip(".")
        raise ModelError(
            f"model.name is {name!r}, and it cannot be loaded ({first}); give a folder, builtin/tiny, or, online, a Hub id"
        ) from error


@contextmanager
def quiet() -> Iterator[None]:
    """Silence transformers' reports and progress bars, and accelerate's: a new classifier head is expected here.

    Within the block, its Auto classes also know the architecture of `mean_pooled`.
    """
    from transformers.utils import logging

    from secure_fed.learning.models import mean_pooled  # noqa: F401

    level, bars = logging.get_verbosity(), logging.is_progress_bar_enabled()
    logging.set_verbosity_error()
    logging.disable_progress_bar()
    of_accelerate = getLogger("accelerate.big_modeling")
    before = of_accelerate.level
    of_accelerate.setLevel("ERROR")
    try:
        yield
    finally:
        of_accelerate.setLevel(before)
        logging.set_verbosity(level)
        if bars:
            logging.enable_progress_bar()
