"""The rules of a diagnosis, as data: what a cause looks like, the sentence that says it, and what may help.

A failed run is matched by its cause, anchored at the start, since what follows may quote the user's data. Where the
cause is only a consequence (`CONSEQUENCES`), lines of the log are matched too. The numbers of a run that did not fail
are matched by `app.diagnosis.trends`.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

from app.diagnosis import changes, trends
from app.diagnosis.facts import Metrics
from app.diagnosis.plan import Plan

Facts = dict[str, Any]
Value = str | Callable[[Plan, Facts], str | None]
"""Value of an option, fixed or computed; None where the remedy does not apply."""


@dataclass(frozen=True)
class Remedy:
    """A change of options.

    Args:
        text: what it does; `{name}` stands for a fact, a new value, or an option of `config`.
        options: new values of training options.
        launch: new values of launch options, such as `strategy`.
    """

    text: str
    options: Mapping[str, Value] = field(default_factory=dict)
    launch: Mapping[str, Value] = field(default_factory=dict)


@dataclass(frozen=True)
class Rule:
    """One cause.

    Args:
        id: name of the cause.
        cause: sentence; `{name}` stands for a fact or an option of `config`.
        pattern: regular expression that the cause of a failed run matches at its start; its groups become facts.
        log: regular expression that a line of the log matches at its start, without time, rank and torch's prefix.
        always: whether `log` is looked for in a run that did not fail, too.
        when: further condition on the numbers of a run whose cause matches.
        trend: condition on the numbers of a run that did not fail; returns facts.
        remedies: changes that may help, the likeliest first.
        help: what to do besides, in one sentence.
        evidence: regular expression of further lines of the log to show.
    """

    id: str
    cause: str
    pattern: str = ""
    log: str = ""
    always: bool = False
    when: Callable[[Metrics, Plan], bool] | None = None
    trend: Callable[[Metrics, Plan], Facts | None] | None = None
    remedies: tuple[Remedy, ...] = ()
    help: str = ""
    evidence: str = ""


SMALLER_MICRO_BATCH = Remedy(
    "micro-batches of {per_device_train_batch_size} rows instead of {config.per_device_train_batch_size}; the global "
    "batch, and so the model, stays the same",
    {"per_device_train_batch_size": changes.smaller_micro_batch},
)
SMALLER_EVAL_BATCH = Remedy(
    "evaluation batches of {per_device_eval_batch_size} rows instead of {config.per_device_eval_batch_size}; the "
    "result stays the same, but for the rounding of answers that a run samples",
    {"per_device_eval_batch_size": changes.smaller_eval_batch},
)
RECOMPUTE = Remedy(
    "recompute activations in the backward pass: less memory for about a third more time, the same model",
    {"gradient_checkpointing": "true"},
)
OFFLOAD_ACTIVATIONS = Remedy(
    "keep saved activations in host memory until the backward pass, the same model",
    {"gradient_checkpointing": "true", "activation_offloading": changes.offloaded},
)
SHARD_MORE = Remedy(
    "strategy {strategy} instead of {used_strategy}: each device keeps less of the model, the same model comes out",
    launch={"strategy": changes.more_sharded},
)
LESS_MEMORY = (SMALLER_EVAL_BATCH, SMALLER_MICRO_BATCH, RECOMPUTE, OFFLOAD_ACTIVATIONS, SHARD_MORE)
LOWER_RATE = Remedy(
    "learning rate {learning_rate} instead of {config.learning_rate:g}", {"learning_rate": changes.tenth_of_rate}
)
SKIP = Remedy("skip the updates that are not finite, at most ten in a row", {"non_finite": "skip"})
CLIP = Remedy("clip the gradient norm at {max_grad_norm}", {"max_grad_norm": changes.clipped})
SKIP_BAD_ROWS = Remedy("skip rows that cannot be read, and list them", {"bad_rows": "skip"})
NO_COPY = Remedy("without copies of the checkpoints elsewhere", {"checkpoint_url": "none"})
LONGER_ROWS = Remedy(
    "rows of up to {max_length} tokens instead of {config.max_length}", {"max_length": changes.longest_row}
)

_ERROR = r"(?:\w+\.)*"
_MEMORY = (
    rf"{_ERROR}(?:OutOfMemoryError|MemoryError)\b"
    r"|RuntimeError: (?:\[enforce fail at |.{0,80}DefaultCPUAllocator: can't allocate memory"
    r"|CUDA error: out of memory|.{0,60}CUDA driver error: out of memory|.{0,60}_ALLOC_FAILED)"
    r"|OSError: \[Errno 12\]|DistBackendError: .{0,400}Cuda failure 2 'out of memory'"
)

_OWN = r"(?!(?:\w+\.)*[A-Z]\w*: )(?:.*; )?"
"""Before a sentence of ours: others, but no exception's, which may quote anything."""
_SYSTEM = (
    r"(?:(?:\w+\.)*(?:OS|IO|Permission|BlockingIO|File(?:NotFound|Exists)|(?:Not|Is)ADirectory|Safetensor|_Queue"
    r"|Training)Error: "
    r"|[\w .:/=-]{3,300} failed: rank \d+: )?(?:[\w ]{0,40}: )?(?:I/O error: )?"
)
"""Before an error of the system: the name of an exception, or what a rank did."""

_SELF_CHECK = r"(?:the run is not set up as requested|checking that the run is set up as requested failed): "


def _not_as_requested(rule_id: str, properties: str, help_text: str, *remedies: Remedy) -> Rule:
    """A rule for the self-check at the start of a run: the first of these properties is not what was requested."""
    pattern = _SELF_CHECK + rf"(?P<what>(?:rank \d+: )?(?:{properties}): requested .{{0,300}})"
    return Rule(rule_id, "The ranks did not get what was asked for: {what}.", pattern,
                remedies=remedies, help=help_text)  # fmt: skip


SELF_CHECK_RULES = (
    _not_as_requested(
        "other_launch", "processes|distributed type|wrapper|own accumulation",
        "Something else has set up the processes: look for ACCELERATE_* variables and those of torchrun in the "
        "environment, and start it with the line in command.txt."),
    _not_as_requested(
        "other_backend", "communication", "Something else has set up torch.distributed before the run did.",
        Remedy("let each device choose its backend", {"ddp_backend": "auto"})),
    _not_as_requested(
        "other_kernel", "attention", "This model, or the installed transformers, does not take that kernel.",
        Remedy("let the model choose its attention kernel", {"attn_implementation": "auto"})),
    _not_as_requested(
        "other_dtype", "trained weights|frozen weights|weights of the .{1,40}|matrix products",
        "A layer of this model keeps or computes in a dtype of its own.",
        Remedy("train in fp32, which takes more memory", {"mixed_precision": "no"})),
    _not_as_requested(
        "other_layers", "float8 layers|rounding layers|4-bit layers|4-bit share",
        "The package that replaces these layers (torchao, bitsandbytes) has left some as they are: compare its version "
        "with constraints.txt, or train this model without it."),
    _not_as_requested(
        "other_layout", "mesh|ZeRO stage|offload|second copies|Adam's share|weights held|experts held",
        "The strategy did not divide this model as its file says: compare accelerate and deepspeed with "
        "constraints.txt, or take another strategy."),
    Rule("not_as_requested", "The ranks did not get what was asked for: {what}.", _SELF_CHECK + r"(?P<what>.{0,300})",
         help="Compare the packages with constraints.txt."),
)  # fmt: skip
"""What the self-check names, and what is to be done about each; the last is for what the others do not know."""

MEMORY_RULES = (
    Rule("out_of_memory", "{who} ran out of memory{doing}.", _MEMORY, log=_MEMORY, remedies=LESS_MEMORY,
         evidence=r".*(?:[Tt]ried to allocate|allocated (?:memory|by PyTorch)|DefaultCPUAllocator)"),
    Rule("killed", "{who} was killed (SIGKILL): by the system, if memory ran out, or by hand.",
         r"(?:local )?rank (?P<rank>\d{1,15})\b.{0,40} was killed by SIGKILL", remedies=(*LESS_MEMORY[1:],),
         help="`dmesg` or the log of your cluster says whether the system's OOM killer did it."),
)  # fmt: skip

_NOT_FINITE = (
    r"step (?P<step>\d{1,15}): loss (?P<loss>\S+), gradient norm (?P<norm>[^,\s]+), (?P<origin>[^,;]{1,200}"
    r"(?:, in the batch from [^,;]{1,200})?).{0,400}?; no weight"
)
NUMBER_RULES = (
    Rule("skipped_updates", "Ten updates in a row were skipped, up to step {step}: no update is finite any more.",
         r"step (?P<step>\d{1,15}): the \d+th update in a row that was skipped", remedies=(LOWER_RATE, CLIP),
         evidence=r"warning: step \d+: loss .*its update is skipped"),
    Rule("diverged", "Training diverged: the loss rose until step {step} was no longer finite, {origin}.",
         _NOT_FINITE,
         when=trends.grew_before_the_end, remedies=(LOWER_RATE, CLIP, SKIP)),
    Rule("not_finite", "Loss {loss} and gradient norm {norm} at step {step}, {origin}.",
         _NOT_FINITE,
         remedies=(SKIP, LOWER_RATE, CLIP), help="Look at those rows: `tunesmith data` shows what is trained of them."),
    Rule("loss_spike", "The loss spiked at step {step}: {ratio} times its recent median.",
         r"step (?P<step>\d{1,15}): loss \S+ is (?P<ratio>[\d.]+) times the median",
         remedies=(LOWER_RATE, Remedy("go on without watching for spikes", {"loss_spike_factor": "0"})),
         help="Resumed unchanged, the run goes back before the spike and skips its batches."),
)  # fmt: skip

HANG_RULES = (
    Rule("hang", "Rank {rank} hung in {section} {at}{condition}, for {seconds} s.",
         r"RankHung: rank (?P<rank>\d{1,15}) hangs in (?P<section>[\w-]+) (?P<at>(?:of|after) step \d+)"
         r"(?P<condition>[^;]{0,80})(?:; rank [^;]{0,120})*; no progress for (?P<seconds>\d{1,15}) s",
         remedies=(Remedy("wait {hang_timeout} s instead of {config.hang_timeout} s before a rank counts as hanging",
                          {"hang_timeout": changes.longer_timeout}),),
         help="Its stack is in the log.", evidence=r'  File "(?!.*/(?:threading|heartbeat)\.py)'),
    Rule("collective_timeout", "A collective did not complete in time: some rank never came to it.",
         r"(?:RuntimeError|DistBackendError): (?:\[[^\]]{0,200}\] ?)?(?:Timed out waiting \d+ms for (?:recv|send)"
         r"|Rank \d+ (?:failed to pass|timed out)|.{0,120}[Tt]imed out after \d+ ?ms|.{0,60}monitoredBarrier)",
         log=r"(?:\[Rank \d+\] )?Watchdog caught collective operation timeout: (?P<what>WorkNCCL\(.{0,300}\))",
         help="The rank that is missing from the others' lines is the one to look at; --ddp_timeout is how long they "
              "wait.",
         evidence=r".*(?:collective operation timeout|OpType=|failed to pass monitoredBarrier)"),
)  # fmt: skip

_REFUSED = (
    rf"{_ERROR}(?:DistNetworkError|DistStoreError|RuntimeError): .{{0,200}}(?:failed to connect|[Cc]onnection "
    rf"refused|timed out after \d+ms|client socket has timed out)|{_ERROR}ConnectionRefusedError\b"
)
_CONNECT = r"The client socket has timed out after \d+ms while trying to connect"
NETWORK_RULES = (
    Rule("port_taken", "A port is taken by another program: {port}.",
         rf"{_ERROR}(?:DistNetworkError|RuntimeError): .{{0,200}}\bport: (?P<port>\d{{1,15}}).{{0,80}}EADDRINUSE"
         rf"|{_ERROR}OSError: \[Errno 98\]",
         log=r".{0,120}\bport: (?P<port>\d{1,15}).{0,80}EADDRINUSE",
         remedies=(Remedy("port {main_process_port}", launch={"main_process_port": changes.other_port}),),
         help="A run on one machine takes a free port at its next start: resume it."),
    Rule("unknown_host", "The name of a machine is not known here: {host}.",
         rf"{_ERROR}(?:DistNetworkError|DistStoreError|RuntimeError): .{{0,160}}"
         r"(?:hostname|host(?:name)?=|\[?)(?P<host>[\w.-]*).{0,80}(?:EAI_NONAME|gai error|Name or service not known"
         r"|Temporary failure in name resolution)|(?:\w+\.)*gaierror: ",
         log=r"The IPv[46] network addresses of \((?P<host>[^,\s]+), \d+\) cannot be retrieved \(gai error: -[23] ",
         help="Give --main_process_ip the address of machine 0, or add the name to /etc/hosts."),
    Rule("machine_unreachable", "Machine 0 does not answer: the connection was refused or timed out.",
         _REFUSED, log=_CONNECT, when=trends.several_machines,
         help="Start the run on machine 0 first, and let --main_process_port through its firewall."),
    Rule("connection_refused", "Nothing answers where {who_lower} connects to: the connection was refused or timed "
         "out.", _REFUSED, log=_CONNECT,
         help="The log says what it is: another rank that has ended, or a service that does not run."),
    Rule("nccl_network", "NCCL could not reach the other ranks over the network.",
         r"DistBackendError: .{0,400}(?:NCCL error|Last error).{0,200}(?:socket|connect|Net|IB|ibv|timed? ?out)",
         log=r"\S+ \[\d+\] NCCL WARN .{0,120}(?:NET/|Connect|socket|ibv_|Call to)",
         help="Set NCCL_SOCKET_IFNAME to the interface between the machines, and NCCL_DEBUG=INFO to see more.",
         evidence=r".*NCCL WARN"),
    Rule("nccl_error", "NCCL failed on {who_lower}.",
         r"(?:\w+\.)*DistBackendError: .{0,400}(?:NCCL|nccl)",
         log=r"\S+ \[\d+\] NCCL WARN ", help="Set NCCL_DEBUG=INFO and resume to see more.",
         evidence=r".*NCCL WARN"),
    Rule("peer_lost", "Another rank ended without saying why, and {who_lower} lost its connection to it.",
         r"another rank died, was killed or hung|RuntimeError: (?:Gloo \w+ failed|\[(?!enforce)[^\]]{0,200}\bgloo/"
         r"|(?:\[[^\]]{0,200}\] ?)?Connection (?:closed|reset) by peer)"
         r"|(?:\w+\.)*DistBackendError: ",
         help="The last lines of each rank in the log tell which one went first.", evidence=r".*\(exitcode: -?\d"),
)  # fmt: skip

DEVICE_RULES = (
    Rule("driver_too_old", "The NVIDIA driver is too old for this build of PyTorch.",
         r"RuntimeError: (?:The NVIDIA driver on your system is too old|.{0,60}CUDA driver version is insufficient)",
         log=r".{0,160}(?:driver on your system is too old|CUDA driver version is insufficient)",
         help="Update the driver, or install a build of PyTorch for the CUDA version that `nvidia-smi` shows."),
    Rule("no_kernel", "This build of PyTorch has no code for this GPU.",
         r"(?:\w+\.)*(?:AcceleratorError|RuntimeError): CUDA error: no kernel image is available",
         help="Install a build of PyTorch that lists the GPU's compute capability."),
    Rule("gpu_lost", "A GPU failed: {what}.",
         r"(?:\w+\.)*(?:AcceleratorError|RuntimeError): CUDA error: (?P<what>uncorrectable ECC error encountered"
         r"|unspecified launch failure|device not ready|GPU is lost|the launch timed out[^\n]{0,40}"
         r"|hardware stack error|uncorrectable NVLink error[^\n]{0,60})",
         log=r"NVRM: Xid .{0,200}?: (?P<what>.{3,100})",
         help="`nvidia-smi -q` and `dmesg | grep Xid` say more; leave that GPU out with --gpus, and resume."),
    Rule("cuda_assert", "A kernel on {who_lower} met an index out of range.",
         r"(?:\w+\.)*(?:AcceleratorError|RuntimeError): CUDA error: device-side assert triggered"
         r"|IndexError: index out of range in self",
         help="Most often a token id that the embedding does not have: the tokenizer is of another model.",
         evidence=r".*Assertion `"),
    Rule("cuda_access", "A kernel on {who_lower} accessed memory that is not its own.",
         r"(?:\w+\.)*(?:AcceleratorError|RuntimeError): CUDA error: (?:an illegal memory access|misaligned address)",
         remedies=(Remedy("without torch.compile", {"torch_compile": "false"}),
                   Remedy("PyTorch's own attention kernel", {"attn_implementation": "sdpa"}))),
    Rule("native_crash", "{who} crashed in compiled code ({signal}).",
         r"rank (?P<rank>\d{1,15}) was killed by (?P<signal>SIGSEGV|SIGABRT|SIGFPE|SIGTRAP)",
         remedies=(Remedy("without torch.compile", {"torch_compile": "false"}),
                   Remedy("the plain attention kernel", {"attn_implementation": "eager"})),
         help="PYTHONFAULTHANDLER=1 writes the stack of the crash to the log.",
         evidence=r"(?:Fatal Python error|terminate called|  what\(\):|.*[Ss]egmentation fault)"),
    Rule("illegal_instruction", "{who} met an instruction that this processor does not have.",
         r"rank (?P<rank>\d{1,15}) was killed by SIGILL", help="Install builds of torch for this machine."),
    Rule("bus_error", "{who} lost memory that a file backs (SIGBUS): the file was cut off, or shared memory or a disk "
         "is full.",
         r"rank (?P<rank>\d{1,15}) was killed by SIGBUS",
         help="Enlarge /dev/shm (`docker run --shm-size`), look for a full disk, and for what else writes to the data "
              "or --cache_dir."),
    Rule("terminated", "{who} was ended from outside ({signal}).",
         r"(?:local )?rank (?P<rank>\d{1,15})\b.{0,40} was killed by (?P<signal>SIG(?:TERM|HUP|INT|QUIT|XCPU|USR\d))",
         help="A cluster's time limit, or another user? Resume it; nothing that was saved is lost."),
    Rule("launcher_killed", "The launcher was killed ({signal}).",
         r"the launcher was killed(?: by (?P<signal>SIG[A-Z0-9]+|signal \d+))?",
         help="By a cluster's time limit, or another user? Resume it; nothing that was saved is lost."),
)  # fmt: skip

DISK_RULES = (
    Rule("disk_full", "The disk is full: {where}.",
         rf"{_SYSTEM}(?:(?P<where>\S+ has [\d,]+ bytes free, a checkpoint needs [\d,]+)"
         r"|(?:\[Errno 28\] )?No space left on device(?: \(os error 28\))?(?:: (?P<where2>.{1,200}))?"
         r"|\S+ has no room for the copy of)"
         r"|its processes ended .{0,60}, and the disk of (?P<where3>\S+ has [\d,]+ bytes free)"
         r"|cannot write .{0,300}: No space left on device",
         help="Free space there; `tunesmith runs delete` removes runs with their checkpoints."),
    Rule("file_limit", "A file may not grow: a limit on its size, or a quota.",
         rf"{_SYSTEM}(?:\[Errno (?:27|122)\]|File too large|Disk quota exceeded)",
         help="Raise the quota, or `ulimit -f`."),
    Rule("run_not_writable", "The run may not write to its folder: {where}.",
         r"its processes ended .{0,60}, and nothing can be written to (?P<where>.{1,300})",
         help="Make it writable; a disk that turned read-only has often failed."),
    Rule("not_writable", "The system denies access: {where}.",
         rf"{_SYSTEM}(?:\[Errno (?:1|13|30)\]|Read-only file system|Permission denied|Operation not permitted)"
         r"[\w -]{0,60}(?:: '(?P<where>[^'\n]{1,300})')?",
         help="Give the run's user access; a disk that turned read-only has often failed."),
    Rule("too_many_files", "{who} may not open more files.", rf"{_SYSTEM}\[Errno 2[34]\]",
         help="Raise `ulimit -n`, and set dataset_num_proc to 1."),
    Rule("too_many_threads", "The system starts no more processes or threads for this user.",
         rf"RuntimeError: can't start new thread|{_SYSTEM}\[Errno 11\] (?:Resource temporarily unavailable$"
         r"|.{0,80}\b(?:fork|thread))",
         help="Raise `ulimit -u`, and set dataset_num_proc to 1."),
    Rule("folder_gone", "The run folder was removed or replaced while the run trained.",
         rf"{_SYSTEM}(?:\[Errno 2\] )?the run folder .{{0,300}}?was (?:removed|replaced)",
         help="Start it again in a new folder."),
    Rule("path_in_the_way", "A file is where the run needs a folder, or the other way round: {where}.",
         rf"{_SYSTEM}\[Errno (?:17|20|21)\] [\w ]{{1,40}}: '(?P<where>[^'\n]{{1,300}})'",
         help="Move it away, and resume."),
    Rule("disk_error", "The disk reports an error.", rf"{_SYSTEM}\[Errno (?:5|116)\]",
         help="Look at `dmesg`; a network file system may have gone away."),
)  # fmt: skip

REQUEST_RULES = (
    Rule("gated_model", "The model {model} is gated, and you have not been let in.",
         r"model_name_or_path=(?P<model>\S+)(?: at revision \S+)? is gated",
         help="Accept its terms on the Hub, then set HF_TOKEN or run `hf auth login`, and resume."),
    Rule("refused_token", "The Hub refuses your token for {model}.",
         r"model_name_or_path=(?P<model>\S+)(?: at revision \S+)?: the Hub refuses your token",
         help="Set HF_TOKEN to a valid one or run `hf auth login`, and resume."),
    Rule("hub_unreachable", "The model {model} is not on this machine, and the Hub cannot be asked for it.",
         r"model_name_or_path=(?P<model>\S+)(?: at revision \S+)?(?: is not on this machine and HF_HUB_OFFLINE"
         r"| is not a local folder and the Hub is unreachable|: the Hub answers with status)",
         help="Go online, or give --model_name_or_path a local folder."),
    Rule("missing_model", "The model {model} does not exist, or you may not read it.",
         r"model_name_or_path=(?P<model>\S+)(?: at revision \S+)? (?:is neither|does not exist|is a file)"
         r"|(?:\w+\.)*(?:OSError|HFValidationError): Repo id must be in the form .{0,60}: '(?P<model2>[^']{1,300})'",
         help="Check the name; a private model needs HF_TOKEN or `hf auth login`."),
    Rule("damaged_model", "The files of the model are damaged or incomplete.",
         r"model_name_or_path=(?P<model>\S+?):? .{0,400}(?:download (?:or save )?the model again|download it again)"
         r"|(?:\w+\.)*SafetensorError: .{0,80}(?:deserializ|[Hh]eader|[Ii]ncomplete|does not contain tensor)"
         r"|.{0,40}base model's weights are not those|the tokenizer of model_name_or_path=",
         help="Download or save the model again."),
    Rule("no_tokenizer", "The model has no tokenizer that can be used.",
         r"model_name_or_path=\S+ has (?:no tokenizer|only a slow)|cannot load the tokenizer|.{0,200} has no eos_token",
         help="Save a fast tokenizer beside the model (tokenizer.json)."),
    Rule("wrong_tokenizer", "The tokenizer makes tokens that the model does not have.",
         r"model_name_or_path=.{0,300}: its tokenizer produces token \d+",
         help="Use the tokenizer that belongs to the model."),
    Rule("no_chat_template", "The data holds conversations, and the model has no chat template.",
         r"the data holds conversations, but the model's tokenizer has no chat template",
         help="Give --chat_template FILE, or use the model's chat variant."),
    Rule("template_fails", "The chat template cannot render or mark the replies of this data.",
         r"(?:.{0,300}: )?chat template: |the chat template (?:still runs|takes|cannot be compiled)"
         r"|cannot read chat_template=",
         help="`tunesmith data` shows what it makes of a row; give another with --chat_template FILE."),
    Rule("trains_nothing", "No row is left to train on: {reason}.",
         rf"{_OWN}no document is left of (?P<reason>.{{0,300}}?\(longest (?P<longest>[\d,]{{1,20}}) tokens\))",
         remedies=(LONGER_ROWS, Remedy("cut long rows into several", {"overlong": "split"})),
         help="`tunesmith data` shows the trained tokens of each row, and why others are left out."),
    Rule("rows_too_long", "Rows are longer than max_length={config.max_length}.",
         rf"{_OWN}[\d,]+ rows of .{{0,300}} are too long"
         r"|(?!(?:\w+\.)*[A-Z]\w*: )\S.{0,400}?:\d+: too long: ",
         remedies=(Remedy("cut long rows into several", {"overlong": "split"}),
                   Remedy("cut long rows off", {"overlong": "truncate"}))),
    Rule("bad_rows", "The data has rows that cannot be read.",
         rf"{_OWN}[\d,]+ of [\d,]+ rows of .{{0,400}} cannot be used", remedies=(SKIP_BAD_ROWS,),
         help="The log names file and line of each."),
    Rule("missing_data", "The data is not there: {what}.",
         r"(?P<what>(?:dataset_name|eval_dataset_name)[=:] ?.{0,300}?(?:does not exist|matches no file"
         r"|holds no data file|is not a regular file))|cannot read (?P<what2>.{0,200}); check the file"
         r"|(?P<what3>.{0,200}) changed while it was read",
         help="Put it back, or name another with --dataset_name."),
    Rule("reward_fails", "The reward {reward} failed: {what}.",
         r"the reward (?P<reward>\S.{0,300}?) failed: (?P<what>.{1,250})",
         help="Mend it and resume: `metrics.jsonl` and checkpoints are kept."),
    Rule("small_data", "The data has fewer rows than one global batch of {config.global_batch_size}.",
         r"global_batch_size=\d+ is larger than the data: (?P<rows>\d{1,15})",
         remedies=(Remedy("global batches of {global_batch_size} rows", {"global_batch_size": "{rows}",
                                                                        "per_device_train_batch_size": "1"}),)),
    Rule("changed_data", "The data or its options changed since the checkpoint was saved.",
         r"(?!(?:\w+\.)*[A-Z]\w*: ).{0,600}the data, its tokenizer or its options changed since it was saved",
         remedies=(Remedy("go on with the data as it is now; the remaining steps differ", {"force_resume": "true"}),),
         help="Or put the data back as it was."),
    Rule("past_the_end", "The checkpoint is at step {reached}, past the last step of the run.",
         r".{0,400} is at step (?P<reached>\d{1,15}), past the \d+ of this run",
         remedies=(Remedy("a run of {max_steps} steps", {"max_steps": changes.reached_step}),)),
    Rule("copy_unreachable", "The place for copies of checkpoints cannot be used.",
         r"(?:.{0,200}; |.{0,100}failed: rank \d+: )?checkpoint_url=", remedies=(NO_COPY,),
         help="Check its address and credentials."),
    Rule("export_differs", "The exported weights do not give the trained model's loss.",
         r".{0,600}; it is not the trained model(?:.{0,300}(?P<rounded>--dtype float32))?",
         remedies=(Remedy("export in float32", {"export_dtype": changes.exact_dtype}),),
         help="`tunesmith export` tries again; the checkpoint is kept."),
    *SELF_CHECK_RULES,
    Rule("missing_package", "The Python package {package} is missing.",
         r"(?:\w+\.)*(?:ModuleNotFoundError|ImportError): No module named '(?P<package>[\w.]+)'",
         log=r"(?:\w+\.)*ModuleNotFoundError: No module named '(?P<package>[\w.]+)'",
         help="Install it in the environment of Tunesmith, or leave out the option that needs it."),
    Rule("other_version", "The Python package {package} is of a version without {name}.",
         r"(?:\w+\.)*ImportError: cannot import name '(?P<name>[\w.]+)' from '(?P<package>[\w.]+)'",
         help="Install the versions in constraints.txt in the environment of Tunesmith."),
    Rule("missing_library", "A shared library cannot be loaded: {library}.",
         r"(?:\w+\.)*(?:OS|Import)Error: (?P<library>\S{1,300}\.so[\w.]{0,20}): "
         r"(?:cannot open shared object|undefined symbol)",
         help="Install the package that needs it again, in the version in constraints.txt; see LD_LIBRARY_PATH too."),
    Rule("launcher_failed", "The launcher could not start the ranks: {what}.",
         r"(?:the launcher could not be started: (?P<what>.{0,200})"
         r"|(?:rank \d+|the launcher) ended with exit status \d+.{0,200}?"
         r"(?:can't open file|No such file)(?P<what2>.{0,200}))",
         help="Install Tunesmith and its environment again."),
    Rule("never_started", "The run never started.", r"it never started: there is no state file",
         help="Start it again."),
    Rule("vanished", "All processes of the run ended without a word: the machine was restarted, or all were killed.",
         r"its processes ended without reporting a cause(?!, and )", help="Resume it; nothing that was saved is lost."),
)  # fmt: skip

TREND_RULES = (
    Rule("stop_token", "No stop token is trained: the model will not learn to end its replies.", always=True,
         log=r"warning: no stop token is trained, so the model will not learn to end its reply: the template writes "
             r"none after a last reply; give --chat_template FILE that does$",
         help="Give --chat_template FILE that writes one after the last reply."),
    Rule("tracker", "A tracker, {tracker}, is done without: {what}.", always=True,
         log=r"warning: (?:report_to=)?(?P<tracker>\w+) (?:did not start|gets no more rows) "
             r"\((?P<what>.{0,250}?)\)(?:; |$)",
         help="Check its settings and its address; metrics.jsonl has every row."),
    Rule("flat_loss", "The loss does not fall: {first} at the beginning, {last} at the end, at a learning rate of "
         "{rate}.", trend=trends.loss_does_not_fall,
         remedies=(Remedy("learning rate {learning_rate}, usual for {config.method}",
                          {"learning_rate": changes.usual_rate}),),
         help="`tunesmith data` shows which tokens are trained."),
    Rule("rising_loss", "The loss rises: {first} around step {step}, {last} at the end.", trend=trends.loss_rises,
         remedies=(LOWER_RATE, CLIP,
                   Remedy("go back to a checkpoint when the loss spikes, and skip those batches",
                          {"loss_spike_factor": "5"}))),
    Rule("overfit", "The evaluation loss rises since step {step}, from {first} to {last}: the model learns its data by "
         "heart.", trend=trends.eval_rises,
         remedies=(Remedy("export the best step, and stop after 3 evaluations without improvement",
                          {"load_best_model_at_end": "true", "early_stopping_patience": "3"}),)),
    Rule("long_warmup", "The learning rate only warmed up, to {reached}: {warmup} steps of warm-up for {total}.",
         trend=trends.warmup_is_too_long,
         remedies=(Remedy("{warmup_steps} steps of warm-up", {"warmup_steps": changes.tenth_of_steps}),)),
    Rule("data_wait", "{share} of the time goes into waiting for data.", trend=trends.waits_for_data,
         help="Put the data, and --cache_dir, on a faster disk."),
    Rule("pipeline_bubble", "Each rank of the pipeline idles for {share} of a step: {count} micro-batches for {stages} "
         "stages.", trend=trends.pipeline_is_idle,
         remedies=(Remedy("micro-batches of {per_device_train_batch_size} rows, so that there are more of them",
                          {"per_device_train_batch_size": changes.least_micro_batch}),)),
    Rule("small_batch", "The GPUs do {share} of what they can, in {memory} GiB: the micro-batches are small.",
         trend=trends.batch_is_small,
         remedies=(Remedy("micro-batches of {per_device_train_batch_size} rows; the global batch stays the same",
                          {"per_device_train_batch_size": changes.twice_the_micro_batch}),)),
    Rule("slow_rank", "Rank {rank} is slow, and the others wait for it.", trend=trends.a_rank_is_slow,
         help="Look for other programs there, its clock speed and its temperature.",
         evidence=r"warning: rank \d+ is slow"),
)  # fmt: skip

RULES = (
    *MEMORY_RULES, *NUMBER_RULES, *HANG_RULES, *REQUEST_RULES, *DISK_RULES, *NETWORK_RULES, *DEVICE_RULES, *TREND_RULES,
)  # fmt: skip
CONSEQUENCES = frozenset(
    {
        "peer_lost",
        "machine_unreachable",
        "connection_refused",
        "native_crash",
        "terminated",
        "launcher_killed",
        "nccl_error",
        "launcher_failed",
        "",
    }
)
"""Rules whose cause may only follow from another, which lines of the log show; empty: no rule matched."""
