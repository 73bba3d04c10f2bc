"""What of optimizers, modules and the optimizer's constructor is refused: the pure checks one by one."""

import json

import pytest
import torch
from deepspeed.moe.layer import MoE
from deepspeed.pipe import PipelineModule
from torch import nn

from ds_slide.config import SlideConfig
from ds_slide.errors import SlideConfigError
from ds_slide.integration.contract import check_supported, model_problems, optimizer_choice_problems, optimizer_problems


class TestOptimizers:
    parameters = (nn.Parameter(torch.zeros(2)),)

    def problems(self, optimizer):
        return list(optimizer_problems(optimizer))

    @pytest.mark.parametrize("options", [{}, {"fused": True}, {"foreach": True}, {"foreach": False}])
    @pytest.mark.parametrize("kind", [torch.optim.Adam, torch.optim.AdamW])
    def test_adam_in_every_implementation_is_accepted(self, kind, options):
        assert self.problems(kind(self.parameters, **options)) == []

    @pytest.mark.parametrize("values", [{"eps": (1e-30, 1e-3)}, {"betas": 0.9}, {"eps": None}], ids=json.dumps)
    def test_groups_of_another_optimizer_are_refused_once(self, values):
        optimizer = torch.optim.AdamW([{"params": [nn.Parameter(torch.zeros(2))]} for _ in range(2)])
        for group in optimizer.param_groups:
            group.update(values)
        (problem,) = self.problems(optimizer)
        assert problem.startswith("parameter group 0 of AdamW has eps ")
        assert 'use AdamW, which is optim="adamw_torch" in the Trainer' in problem

    @pytest.mark.parametrize("option", ["amsgrad", "maximize", "differentiable"])
    def test_variants_of_the_rule_are_refused(self, option):
        groups = [{"params": [nn.Parameter(torch.zeros(2))]}, {"params": [nn.Parameter(torch.zeros(2))], option: True}]
        assert self.problems(torch.optim.AdamW(groups)) == [
            f"{option} is true in parameter group 1, but DS-Slide does not support it; set it to false"
        ]

    def test_adam_with_the_decay_of_adamw_is_refused(self):
        # Its class says L2 regularisation and its group says decoupled decay.
        (problem,) = self.problems(torch.optim.Adam(self.parameters, decoupled_weight_decay=True))
        assert problem == "decoupled_weight_decay is true in parameter group 0 of Adam; use torch.optim.AdamW instead"

    def test_other_classes_step_by_themselves(self):
        class AdamW(torch.optim.AdamW):
            pass

        assert self.problems(torch.optim.Adagrad(self.parameters, lr=0.1)) == []
        assert self.problems(AdamW(self.parameters)) == []
        (problem,) = self.problems(torch.optim.LBFGS(self.parameters))
        assert problem.startswith("torch.optim.lbfgs.LBFGS needs a closure in step()")

    def test_low_precision_moments_are_refused(self):
        optimizer = torch.optim.AdamW(self.parameters)
        optimizer.fp32_optimizer_states = False  # as DeepSpeedCPUAdam keeps its argument
        (problem,) = self.problems(optimizer)
        assert problem.startswith("optimizer.params.fp32_optimizer_states is false, but")

    def test_what_is_asked_for(self):
        assert list(optimizer_choice_problems("adamw", None)) == []
        assert list(optimizer_choice_problems(None, torch.optim.AdamW(self.parameters))) == []
        assert list(optimizer_choice_problems(None, torch.optim.AdamW)) == []
        # The script's optimizer overrides the JSON's.
        assert list(optimizer_choice_problems("lion", torch.optim.AdamW(self.parameters))) == []
        assert len(list(optimizer_choice_problems("adamw", torch.optim.LBFGS(self.parameters)))) == 1
        assert list(optimizer_choice_problems("NAdam", None)) == []  # DeepSpeed takes it from torch.optim


def test_modules_of_other_parallelisms():
    # Made without their constructors, which need process groups; the check looks at classes only.
    model = nn.Sequential(nn.Linear(2, 2), nn.Module())
    model[1].moe = MoE.__new__(MoE)
    nn.Module.__init__(model[1].moe)
    (problem,) = model_problems(model)
    assert problem.startswith(
        "module 1.moe is a DeepSpeed MoE, but DS-Slide has no expert parallelism; use the experts"
    )
    pipeline = PipelineModule.__new__(PipelineModule)
    nn.Module.__init__(pipeline)
    (problem,) = model_problems(pipeline)
    assert problem.startswith("the model is a DeepSpeed PipelineModule, but DS-Slide has no pipeline parallelism")
    assert list(model_problems(nn.Sequential(nn.Linear(2, 2)))) == []


class TestConstructorArguments:
    """check_supported, with what _configure_zero_optimizer hands over."""

    def check(self, dtype=torch.bfloat16, model=None, slide=None, **kwargs):
        model = model or nn.Linear(2, 2).to(dtype)
        check_supported(kwargs, torch.optim.AdamW(model.parameters()), model, SlideConfig(**(slide or {})))

    def refused(self, **arguments):
        with pytest.raises(SlideConfigError) as caught:
            self.check(**arguments)
        return str(caught.value)

    @pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32])
    def test_accepted(self, dtype):
        self.check(
            dtype,
            communication_data_type=dtype,
            gradient_accumulation_dtype=torch.float32,
            postscale_gradients=True,
            gradient_predivide_factor=1.0,
            clip_grad=1.0,
            zero_hpz_partition_size=1,
            all2all_process_group=None,
            mpu=None,
        )

    def test_settings_under_other_names(self):
        assert self.refused(postscale_gradients=False).startswith("prescale_gradients is true, but")
        message = self.refused(all2all_process_group=object())
        assert message.startswith("zero_optimization.zero_quantized_gradients is true, but")

    def test_dtypes(self):
        message = self.refused(communication_data_type=torch.float32, gradient_accumulation_dtype=torch.bfloat16)
        assert message == (
            "gradients are reduced in torch.float32 (communication_data_type) and added up in torch.bfloat16 "
            "(data_types.grad_accum_dtype), which loses what the first keeps; set the second to fp32"
        )
        message = self.refused(gradient_accumulation_dtype=torch.float16)
        assert message.startswith("gradients are reduced in torch.bfloat16 (communication_data_type) and added up in")
        message = self.refused(dtype=torch.float64)
        assert message.startswith("parameter weight is torch.float64 and requires a gradient, but DS-Slide trains")

    def test_what_deepspeed_gives_for_parameters_of_other_dtypes_is_accepted(self):
        """The keys are the engine's defaults, which follow the enabled precision and not the parameters."""
        adapters = nn.Sequential(nn.Linear(2, 2).bfloat16().requires_grad_(False), nn.Linear(2, 2))
        bf16, fp32 = torch.bfloat16, torch.float32
        self.check(model=adapters, communication_data_type=bf16, gradient_accumulation_dtype=bf16)
        self.check(bf16, communication_data_type=fp32, gradient_accumulation_dtype=fp32)

    def test_fp16_and_unheld_gradients(self):
        message = self.refused(dtype=torch.float16, slide={"defer_updates": False})
        assert message.startswith("ds_slide.defer_updates is false, but fp16 can overflow, so that")

    def test_optimizer(self):
        model = nn.Linear(2, 2).bfloat16()
        with pytest.raises(SlideConfigError, match=r"torch\.optim\.lbfgs\.LBFGS needs a closure"):
            check_supported({}, torch.optim.LBFGS(model.parameters(), lr=0.1), model, SlideConfig())
        check_supported({}, torch.optim.Adagrad(model.parameters(), lr=0.1), model, SlideConfig())
