"""All tasks by name, and examples of them."""

from jaxinfer.evaluation.tasks.arithmetic import Arithmetic
from jaxinfer.evaluation.tasks.base import Example, Task, Turn, examples, is_held_out
from jaxinfer.evaluation.tasks.choice import Choice
from jaxinfer.evaluation.tasks.code import Code
from jaxinfer.evaluation.tasks.retrieval import Retrieval
from jaxinfer.evaluation.tasks.session import Session
from jaxinfer.evaluation.tasks.tool_call import ToolCall

TASKS: dict[str, Task] = {
    task.name: task for task in (Arithmetic(), Choice(), ToolCall(), Code(), Retrieval(), Session())
}

__all__ = ["TASKS", "Example", "Task", "Turn", "examples", "is_held_out"]
