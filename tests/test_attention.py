"""The setting `attention`: backends by diffusers' names, checked before any weight is read."""

import pytest
import tiny_families
import torch
from diffusers.models import attention_dispatch
from diffusers.models.attention_dispatch import AttentionBackendName

from chunk_grpo import InputError
from chunk_grpo.core.settings import load_settings
from chunk_grpo.models import trainable

SIZE = {"resolution": 64, "max_tokens": 16}
FLASH = "aten::_scaled_dot_product_flash_attention_for_cpu"
MATH = "aten::_scaled_dot_product_attention_math"


def active_backend() -> AttentionBackendName:
    """Return the backend of layers that choose none."""
    return attention_dispatch._AttentionBackendRegistry.get_active_backend()[0]


@pytest.fixture(autouse=True, scope="module")
def cache(tmp_path_factory):
    """Embeddings of these models do not stay in the user's cache."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("CHUNK_GRPO_CACHE", str(tmp_path_factory.mktemp("cache")))
        yield


@pytest.fixture(scope="module")
def models(tmp_path_factory) -> dict[str, str]:
    """One tiny model of each of some families, by the family's name."""
    folder = tmp_path_factory.mktemp("attention")
    names = ("dev", "qwen", "z_image", "sd3")
    return {name: str(tiny_families.build(name, folder / name)) for name in names}


@pytest.fixture
def weights_unread(monkeypatch):
    """Fail a test that reads weights."""
    monkeypatch.setattr(
        trainable, "load_policy", lambda *given, **more: pytest.fail("weights were read")
    )


def velocity_and_gradient(
    model: str,  # a folder
    attention: str,  # the setting
) -> tuple[torch.Tensor, torch.Tensor, set[str]]:
    """Return the velocity, the gradient of an adapter, and the names of torch's operations."""
    policy = trainable.load_trainable_policy(model, **SIZE, attention=attention, lora_rank=2)
    rows = policy.encode(["a red star", "two cats left of a green square"])
    noise = [policy.noise(torch.Generator().manual_seed(i)) for i in range(2)]
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU]) as profiler:
        velocity = policy.velocity(torch.stack(noise), torch.tensor([0.9, 0.3]), rows)
        velocity.square().sum().backward()
    gradients = [weight.grad for weight in policy.trained if weight.grad is not None]
    gradient = torch.cat([x.flatten() for x in gradients])
    return velocity.detach(), gradient, {event.key for event in profiler.key_averages()}


@pytest.mark.parametrize(
    "family, name, runs, runs_not",
    [
        ("dev", "_native_math", MATH, FLASH),
        ("dev", "_native_flash", FLASH, MATH),
        pytest.param("qwen", "_native_math", MATH, FLASH, marks=pytest.mark.slow),
        pytest.param("z_image", "_native_math", MATH, FLASH, marks=pytest.mark.slow),
    ],
)
def test_backend_computes_what_native_does_with_its_own_kernel(
    family, name, runs, runs_not, models
):
    expected, expected_gradient, _ = velocity_and_gradient(models[family], "native")
    velocity, gradient, operations = velocity_and_gradient(models[family], name)
    torch.testing.assert_close(velocity, expected, rtol=1e-4, atol=1e-4)
    largest = expected_gradient.abs().max()
    assert (gradient - expected_gradient).abs().max() < 1e-4 * largest and largest > 0
    assert runs in operations and runs_not not in operations
    assert active_backend() is AttentionBackendName.NATIVE, "other models are not changed"


def test_name_that_diffusers_does_not_know_is_rejected_with_all_names():
    with pytest.raises(InputError) as error:
        load_settings("pocket/tiny", {"attention": "_native_mat"})
    text = str(error.value)
    assert text.startswith("`attention` must be one of ") and "\n" not in text
    assert text.endswith("got '_native_mat', did you mean _native_math?")
    assert all(backend.value in text for backend in AttentionBackendName)


@pytest.mark.parametrize("old", ["math", "efficient", "cudnn"])
def test_names_of_torchs_kernels_without_prefix_lead_to_those_of_diffusers(old):
    with pytest.raises(InputError, match=f"got '{old}', did you mean _native_{old}"):
        load_settings("pocket/tiny", {"attention": old})


@pytest.mark.parametrize("family", ["dev", "qwen"])
@pytest.mark.parametrize(
    "name, reason",
    [("flash", "install `flash-attn"), ("_flash_3_hub", "install it with `pip install kernels`")],
)
def test_backend_of_a_missing_package_is_rejected_before_weights_are_read(
    family, name, reason, models, weights_unread, monkeypatch
):
    monkeypatch.setattr(attention_dispatch, "_CAN_USE_FLASH_ATTN", False)
    monkeypatch.setattr(attention_dispatch, "is_kernels_available", lambda: False)
    with pytest.raises(InputError) as error:
        trainable.load_trainable_policy(models[family], **SIZE, attention=name)
    text = str(error.value)
    assert text.startswith("`attention` must be native or ") and "_native_math" in text
    assert f"got {name!r} (" in text and reason in text and "\n" not in text


@pytest.mark.parametrize("family", ["qwen", "z_image"])
def test_backend_without_masks_is_rejected_before_weights_are_read(family, models, weights_unread):
    """These families pass masks; diffusers would raise an error at the first forward pass."""
    with pytest.raises(InputError, match="where prompts have attention masks; got '_native_flash'"):
        trainable.load_trainable_policy(models[family], **SIZE, attention="_native_flash")


def test_layers_that_call_torch_directly_are_said_before_weights_are_read(models, weights_unread):
    with pytest.raises(InputError, match="must be native with SD3Transformer2DModel, whose layers"):
        trainable.load_trainable_policy(models["sd3"], **SIZE, attention="_native_math")


def test_backend_without_a_backward_pass_is_rejected(models, weights_unread, monkeypatch):
    """As sage's, which are for sampling alone."""
    forward = trainable.dispatch_attention_fn
    monkeypatch.setattr(
        trainable, "dispatch_attention_fn", lambda *given, **more: forward(*given, **more).detach()
    )
    with pytest.raises(InputError, match="got '_native_math' .*does not require grad"):
        trainable.load_trainable_policy(models["dev"], **SIZE, attention="_native_math")


def test_kernel_that_needs_one_number_format_is_tried_as_the_network_calls_it(monkeypatch):
    """Behind a norm in float32, queries and keys are float32 where values are bfloat16."""
    seen = []

    def dispatch(query, key, value, attn_mask=None):
        seen.append((query.dtype, key.dtype, value.dtype))
        raise ValueError("formats differ")

    monkeypatch.setattr(trainable, "dispatch_attention_fn", dispatch)
    given = ("native", torch.device("cpu"), torch.bfloat16)
    assert trainable.try_attention_backend(*given, stored=torch.float32) == "formats differ"
    assert seen == [(torch.float32, torch.float32, torch.bfloat16)]
