"""Pretrain a GPT with Mixture-of-Experts layers on Megatron's own training loop (megatron-core 0.19).

    torchrun --nproc-per-node 2 -m megatron_ascend_moe run [--device cpu] examples/pretrain_gpt_moe.py \\
        --text-path FILE … --num-layers 2 … --num-experts 8 --expert-model-parallel-size 2 \\
        --moe-token-dispatcher-type ascend --save runs/one --load runs/one --save-interval 100

It takes the flags of Megatron-LM's pretrain_gpt.py, without what pretraining does not use (fine-tuning,
fill-in-the-middle, distillation, packed sequences). Data is Megatron's indexed datasets (`--data-path`), text
files (`--text-path`) or mock data (`--mock-data`). The tokenizer comes from a file through Megatron's
`--tokenizer-type … --tokenizer-model …`; without those flags text is read byte by byte. Checkpoints are
Megatron's distributed ones, and a run that finds one in `--load` continues it.
"""

import importlib.util
import os
import sys
from functools import partial

try:
    from megatron.training.argument_utils import gpt_config_from_args, pretrain_cfg_container_from_args
except ImportError as error:
    sys.exit(
        f"pretrain_gpt_moe.py needs the training loop of megatron-core 0.19 or newer, got: {error}. Its wheels are for "
        f"Python 3.12 and newer (this is {sys.version.split()[0]}); or give MEGATRON_PATH, a Megatron-LM checkout"
    )

import torch
from megatron.core import mpu
from megatron.core.datasets.blended_megatron_dataset_builder import BlendedMegatronDatasetBuilder
from megatron.core.datasets.gpt_dataset import GPTDataset, GPTDatasetConfig, MockGPTDataset
from megatron.core.enums import ModelType
from megatron.core.rerun_state_machine import get_rerun_state_machine
from megatron.core.utils import get_attr_wrapped_model, get_batch_on_this_cp_rank, get_batch_on_this_tp_rank
from megatron.training import get_args, get_timers, get_tokenizer, pretrain, print_rank_0
from megatron.training.arguments import parse_and_validate_args
from megatron.training.utils import get_blend_and_blend_per_split, is_first_or_last_pipeline_stage
from step_log import watch_steps
from text_dataset import BYTE_VOCABULARY, build_text_dataset, encode_bytes

BATCH_KEYS = ("tokens", "labels", "loss_mask", "position_ids", "attention_mask")
UNSERVED = ("sft", "fim_data", "hybrid_context_parallel", "dataloader_inter_document_masking", "mtp_num_layers")


def add_arguments(parser):
    group = parser.add_argument_group("pretrain_gpt_moe")
    group.add_argument("--text-path", nargs="+", metavar="FILE", help="UTF-8 text to tokenise and train on")
    group.add_argument("--text-cache", default="runs/text", help="folder for tokenised text (%(default)s)")
    group.add_argument("--metrics-jsonl", metavar="FILE", help="append one JSON object a step to this file")
    return parser


def get_batch(data_iterator, vp_stage):
    """One micro-batch of this rank: read on tensor rank 0, broadcast, cut along the sequence for CP.

    tokens, labels, position_ids: [micro batch, sequence] int64; loss_mask: the same shape, float32.
    """
    args = get_args()
    if not is_first_or_last_pipeline_stage(vp_stage):
        return dict.fromkeys(BATCH_KEYS)
    batch = {}
    if mpu.get_tensor_model_parallel_rank() == 0:
        read = next(data_iterator)
        batch = {k: read[k].cuda(non_blocking=True) if read.get(k) is not None else None for k in BATCH_KEYS}
    batch = get_batch_on_this_tp_rank(
        batch,
        has_cu_seqlens=False,
        is_hybrid_cp=False,
        create_attention_mask_in_dataloader=args.create_attention_mask_in_dataloader,
        broadcast_src_rank=mpu.get_tensor_model_parallel_src_rank(),
        broadcast_group=mpu.get_tensor_model_parallel_group(),
        cp_size=args.context_parallel_size,
        tp_rank=mpu.get_tensor_model_parallel_rank(),
        micro_batch_size=args.micro_batch_size,
        seq_length=args.seq_length,
        mtp_on_this_rank=False,
        pipeline_model_parallel_size=args.pipeline_model_parallel_size,
        is_pipeline_first_stage=mpu.is_pipeline_first_stage(),
        is_pipeline_last_stage=mpu.is_pipeline_last_stage(),
    )
    batch.setdefault("cu_seqlens", None)
    return get_batch_on_this_cp_rank(batch, is_hybrid_cp=False, cp_group=mpu.get_context_parallel_group())


def loss_func(loss_mask, losses):
    """Sum of the micro-batch's token losses, its token count, and both for Megatron's log."""
    mask = loss_mask.view(-1).float()
    loss = torch.sum(losses.view(-1).float() * mask)
    tokens = mask.sum().detach().to(torch.int)
    if get_args().check_for_nan_in_loss_and_grad:
        for reject in (torch.isnan, torch.isinf):
            get_rerun_state_machine().validate_result(
                result=loss,
                rejection_func=reject,
                message=f"local loss: {reject.__name__}",
                tolerance=0.0,
                fatal=True,
            )
    return loss, tokens, {"lm loss": torch.cat([loss.detach().view(1), tokens.view(1)])}


def forward_step(data_iterator, model):
    """One micro-batch through the model: the token losses, and the function that reduces them."""
    timers = get_timers()
    timers("batch-generator", log_level=2).start()
    batch = get_batch(data_iterator, get_attr_wrapped_model(model, "vp_stage"))
    timers("batch-generator").stop()
    losses = model(
        batch["tokens"],
        batch["position_ids"],
        batch["attention_mask"],
        labels=batch["labels"],
        loss_mask=batch["loss_mask"],
    )
    return losses, partial(loss_func, batch["loss_mask"])


def build_datasets(sample_counts, vp_stage=None):
    """Train, validation and test datasets with at least `sample_counts` samples each."""
    args = get_args()
    if args.text_path:
        args.data_path = [_tokenise_text(args)]
        args.split = args.split or "98,1,1"
    blend, blend_per_split = get_blend_and_blend_per_split(args)
    config = GPTDatasetConfig(
        random_seed=args.seed,
        sequence_length=args.seq_length,
        blend=blend,
        blend_per_split=blend_per_split,
        split=args.split,
        num_dataset_builder_threads=args.num_dataset_builder_threads,
        path_to_cache=args.data_cache_path,
        mmap_bin_files=args.mmap_bin_files,
        tokenizer=get_tokenizer(),
        reset_position_ids=args.reset_position_ids,
        reset_attention_mask=args.reset_attention_mask,
        eod_mask_loss=args.eod_mask_loss,
        create_attention_mask=args.create_attention_mask_in_dataloader,
        mid_level_dataset_surplus=args.mid_level_dataset_surplus,
        allow_ambiguous_pad_tokens=args.allow_ambiguous_pad_tokens,
        context_parallel_size=args.context_parallel_size,
        data_parallel_size=args.data_parallel_size,
        sequence_parallel_size=args.tensor_model_parallel_size * args.sequence_parallel,
    )
    print_rank_0("> building train, validation and test datasets")
    dataset = MockGPTDataset if args.mock_data else GPTDataset
    builder = BlendedMegatronDatasetBuilder(dataset, sample_counts, partial(_reads_data, vp_stage=vp_stage), config)
    return builder.build()


build_datasets.is_distributed = True  # Megatron then calls it on every rank


def _reads_data(vp_stage):
    return mpu.get_tensor_model_parallel_rank() == 0 and is_first_or_last_pipeline_stage(vp_stage)


def _tokenise_text(args) -> str:
    """The data path prefix of `--text-path`, tokenised by the first rank of each node."""
    tokenizer = get_tokenizer()
    if args.tokenizer_type == "NullTokenizer":
        encode, identity = encode_bytes, "bytes"
    else:
        encode, identity = tokenizer.tokenize, f"{args.tokenizer_type} {args.tokenizer_model}"
    build = partial(build_text_dataset, args.text_path, args.text_cache, encode, tokenizer.eod, identity)
    if int(os.environ.get("LOCAL_RANK", "0")) == 0:
        build()
    torch.distributed.barrier()
    return build()


def main():
    args = parse_and_validate_args(
        extra_args_provider=add_arguments,
        args_defaults={"tokenizer_type": "NullTokenizer", "vocab_size": BYTE_VOCABULARY},
    )
    asked = [f"--{name.replace('_', '-')}" for name in UNSERVED if getattr(args, name)]
    if asked:
        raise ValueError(
            f"{', '.join(asked)}: not served by this script, which pretrains on plain sequences; use "
            "Megatron-LM's pretrain_gpt.py with the same run command"
        )
    if args.save and importlib.util.find_spec("psutil") is None:
        raise ValueError("--save: Megatron's distributed checkpoints need psutil (pip install psutil)")
    watch_steps(args, args.metrics_jsonl)
    pretrain(
        pretrain_cfg_container_from_args(args, gpt_config_from_args(args)),
        build_datasets,
        ModelType.encoder_or_decoder,
        forward_step,
    )


if __name__ == "__main__":
    main()
