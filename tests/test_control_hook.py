"""Controls that reach the model, through a hook before every forward."""

from __future__ import annotations

import gc
import weakref
from typing import Any

import pytest
import torch
from dense import relative_error
from diffusers import WanTransformer3DModel
from live_streams import NEW, stream_of, take
from tiny_components import (
    QUICK,
    latents_of,
    make_pipeline,
    record_forwards,
)

from diffusers_ardiff import ARDiffusionPipeline, ControlInputs
from diffusers_ardiff.cache import KVManager


class HookCalls(list[ControlInputs]):
    """A control hook that notes what it gets and adds its controls, numbers, to the latents of each frame."""

    def __call__(self, inputs: ControlInputs) -> dict[str, Any]:
        self.append(inputs)
        offsets = torch.tensor([float(value or 0) for value in inputs.frame_controls])
        return {"hidden_states": inputs.latents + offsets[:, None, None]}

    @property
    def seen(self) -> list[tuple[str, float, int, tuple[Any, ...]]]:
        return [(c.branch, c.timestep[0].item(), c.start_latent_frame, c.frame_controls) for c in self]


class TestControlHook:
    def test_every_forward(self, pipe: ARDiffusionPipeline) -> None:
        """Two steps, then the commit before the next two; each forward gets the controls its chunk was made under."""
        first, second = torch.tensor(QUICK.timesteps(0)).tolist()
        hook = HookCalls()
        with stream_of(pipe, control_hook=hook, controls=1) as stream:
            next(stream)
            stream.update(controls=2)
            next(stream)
        assert hook.seen == [
            ("positive", first, 0, (1, 1, 1)),
            ("positive", second, 0, (1, 1, 1)),
            ("positive", 0.0, 0, (1, 1, 1)),
            ("positive", first, 3, (2, 2, 2)),
            ("positive", second, 3, (2, 2, 2)),
        ]
        assert [call.controls for call in hook] == [1, 1, 1, 2, 2]
        assert {call.latents.shape for call in hook} == {(1, 16, 3, 4, 6)}

    def test_commit_that_is_due_keeps_its_controls(self, pipe: ARDiffusionPipeline) -> None:
        hook = HookCalls()
        with stream_of(pipe, control_hook=hook, controls=1) as stream:
            next(stream)
            stream.rollout.set_controls(2)
            next(stream)
        assert [(seen[2], seen[3][0]) for seen in hook.seen] == [(0, 1)] * 3 + [(3, 2)] * 2

    def test_what_it_returns_is_what_the_model_gets(self, pipe: ARDiffusionPipeline) -> None:
        hook = HookCalls()
        with record_forwards(pipe.transformer) as forwards, stream_of(pipe, control_hook=hook, controls=2) as stream:
            take(stream, 2)
        assert len(forwards) == len(hook) == 5
        for got, inputs in zip(forwards.inputs, hook, strict=True):
            assert torch.equal(got, inputs.latents + 2)

    def test_equals_the_same_edit_inside_the_model(self, pipe: ARDiffusionPipeline) -> None:
        def edit(_module: Any, args: Any, kwargs: dict[str, Any]) -> tuple[Any, dict[str, Any]]:
            return args, kwargs | {"hidden_states": kwargs["hidden_states"] + 2}

        hooked = latents_of(pipe, control_hook=HookCalls(), controls=2)
        plain = latents_of(pipe)
        handle = pipe.transformer.register_forward_pre_hook(edit, with_kwargs=True)
        edited = latents_of(pipe)
        handle.remove()
        assert torch.equal(hooked, edited)
        assert relative_error(hooked, plain) > 1e-2

    def test_hook_that_changes_nothing(self, pipe: ARDiffusionPipeline, plain: torch.Tensor) -> None:
        with stream_of(pipe, control_hook=lambda _inputs: {}) as stream:
            assert torch.equal(take(stream, 4), plain)

    def test_edit_in_place_reaches_this_forward_only(self, pipe: ARDiffusionPipeline) -> None:
        """Latents edited in place would also be what the next step starts from, and what is committed."""

        def edit(inputs: ControlInputs) -> dict[str, Any]:
            inputs.latents.add_(2)
            return {"hidden_states": inputs.latents}

        edited = latents_of(pipe, control_hook=edit, num_frames=33)
        assert torch.equal(edited, latents_of(pipe, control_hook=HookCalls(), controls=2, num_frames=33))

    def test_both_branches(self, pipe: ARDiffusionPipeline) -> None:
        hook = HookCalls()
        call = {"negative_prompt_embeds": NEW, "guidance_scale": 3.0}
        with stream_of(pipe, control_hook=hook, controls=1, **call) as stream:
            take(stream, 2)
        assert [(c.branch, c.timestep[0].item() == 0) for c in hook] == [
            *[("positive", False), ("negative", False)] * 2,
            ("positive", True),
            ("negative", True),
            *[("positive", False), ("negative", False)] * 2,
        ]

    def test_recache_gets_the_controls_of_each_frame(self, pipe: ARDiffusionPipeline) -> None:
        """The window holds the last 5 frames of chunks made under 1, 2 and 3; the latest controls are 4."""
        hook = HookCalls()
        with stream_of(pipe, control_hook=hook) as stream:
            for controls in (1, 2, 3):
                stream.update(controls=controls)
                next(stream)
            stream.update(controls=4)
            stream.update(prompt_embeds=NEW, mode="recache")
            hook.clear()
            next(stream)
        assert [seen[2:] for seen in hook.seen] == [
            (6, (3, 3, 3)),
            (4, (2, 2, 3, 3, 3)),
            (9, (4, 4, 4)),
            (9, (4, 4, 4)),
        ]

    def test_given_frames_and_reset(self, pipe: ARDiffusionPipeline) -> None:
        hook = HookCalls()
        with stream_of(pipe, control_hook=hook, context_latents=torch.randn(1, 16, 3, 4, 6)) as stream:
            next(stream)
            stream.update(controls=1)
            take(stream, 2)
            stream.reset()
            stream.update(controls=2)
            take(stream, 2)
            stream.switch_prompt(prompt_embeds=NEW, mode="recache")
        assert hook.seen[0][2:] == (0, (None,) * 3)
        assert hook.seen[-1][2:] == (0, (1,) * 3 + (2,) * 3), "given frames come again, under the controls in force"

    def test_extra_arguments(self) -> None:
        """A model with an input of its own gets it, here one action a video."""

        class ActionWan(WanTransformer3DModel):
            def forward(self, hidden_states: torch.Tensor, *args: Any, action: torch.Tensor, **kwargs: Any) -> Any:
                return super().forward(hidden_states * action.view(-1, 1, 1, 1, 1), *args, **kwargs)

        pipe = make_pipeline(QUICK)
        plain = latents_of(pipe)
        pipe.transformer.__class__ = ActionWan
        for factor, same in ((1.0, True), (0.5, False)):
            action = torch.tensor([factor])
            acted = latents_of(pipe, control_hook=lambda inputs: {"action": inputs.controls}, controls=action)
            assert torch.equal(acted, plain) == same
        with pytest.raises(TypeError, match="action"):
            latents_of(pipe)

    def test_timestep(self, pipe: ARDiffusionPipeline) -> None:
        with record_forwards(pipe.transformer) as forwards:
            latents_of(pipe, control_hook=lambda inputs: {"timestep": inputs.timestep + 1})
        steps = (torch.tensor(QUICK.timesteps(0)) + 1).tolist()
        assert forwards.timesteps == [*steps, 1.0, *steps]

    @pytest.mark.parametrize(
        ("changed", "error", "message"),
        [
            ({"hidden_states": torch.zeros(1, 16, 4, 4, 6)}, ValueError, r"`hidden_states`, \(1, 16, 3, 4, 6\).*got"),
            ({"hidden_states": torch.zeros(2, 16, 3, 4, 6)}, ValueError, r"got \(2, 16, 3, 4, 6\)"),
            ({"hidden_states": None}, ValueError, "got NoneType"),
            ({"timestep": torch.zeros(1, 18)}, ValueError, r"shape of `timestep`, \(1,\)"),
            ({"encoder_hidden_states": NEW}, ValueError, r"can't set \['encoder_hidden_states'\]: text comes from"),
            ({"return_dict": True}, ValueError, r"can't set \['return_dict'\]"),
            (None, TypeError, "returns a mapping of transformer arguments, got NoneType"),
        ],
        ids=["frames", "videos", "no tensor", "timestep", "text", "return_dict", "nothing"],
    )
    def test_refused(
        self, pipe: ARDiffusionPipeline, manager: KVManager, changed: Any, error: type[Exception], message: str
    ) -> None:
        stream = stream_of(pipe, control_hook=lambda _inputs: changed, cache=manager)
        with record_forwards(pipe.transformer) as forwards, pytest.raises(error, match=message):
            next(stream)
        assert len(forwards) == 0 and stream.closed and manager.allocator.num_used == 0

    def test_recache_whose_hook_raises_leaves_the_history_valid(
        self, pipe: ARDiffusionPipeline, plain: torch.Tensor
    ) -> None:
        broken: list[bool] = []

        def hook(_inputs: ControlInputs) -> dict[str, Any]:
            if broken:
                raise RuntimeError("no controller")
            return {}

        with stream_of(pipe, control_hook=hook) as stream:
            chunks = [take(stream, 2)]
            stream.rollout.commit_held()
            stream.update(prompt_embeds=NEW, mode="recache")
            broken.append(True)
            with pytest.raises(RuntimeError, match="no controller"):
                next(stream)
            broken.clear()
            chunks.append(take(stream, 2))
        assert torch.equal(torch.cat(chunks, dim=2), plain)

    def test_closed_stream_keeps_no_controls(self, pipe: ARDiffusionPipeline) -> None:
        class Joystick:
            pass

        refs = []
        with stream_of(pipe, control_hook=lambda _inputs: {}, controls=Joystick()) as stream:
            refs.append(weakref.ref(stream.rollout.controls))
            for _ in range(2):
                next(stream)
                stream.update(controls=Joystick())
                refs.append(weakref.ref(next(iter(stream.inbox.mailbox._pending)).controls))
        gc.collect()
        assert [ref() for ref in refs] == [None] * 3

    def test_child_goes_on_under_the_controls(self, pipe: ARDiffusionPipeline) -> None:
        shared = pipe.create_cache(num_videos=2)
        hook = HookCalls()
        with stream_of(pipe, cache=shared, control_hook=hook, controls=1) as stream:
            take(stream, 1)
            with stream.fork() as child:
                stream.update(controls=2)
                take(stream, 1)
                hook.clear()
                take(child, 1)
                child.switch_prompt(prompt_embeds=NEW, mode="recache")
        assert {controls for _, _, _, controls in hook.seen} == {(1,) * 3, (1,) * 6}
