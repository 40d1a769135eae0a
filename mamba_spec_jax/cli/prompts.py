"""The prompts of `demo` and `bench`: pieces of Python, to be continued, to be edited, or to be repeated.

The marks that ask for an edit or a repeat are the ones that the bundled model was trained on.
"""

import enum


class PromptKind(enum.StrEnum):
    """What a prompt asks for."""

    FREE = "free"  # go on
    EDIT = "edit"  # the same code with a name changed
    REPEAT = "repeat"  # the same code


# Each with the name that an edit changes, and what it becomes.
_EXCERPTS = (
    (
        "counts",
        "totals",
        '''
def count_words(path, encoding="utf-8"):
    """Return a dictionary of how often each word occurs in the file."""
    counts = {}
    with open(path, encoding=encoding) as stream:
        for line in stream:
            for word in line.split():
                word = word.strip(".,;:").lower()
                counts[word] = counts.get(word, 0) + 1
    return counts
''',
    ),
    (
        "items",
        "entries",
        '''
class Queue:
    """First in, first out, with an optional limit."""

    def __init__(self, maxsize=0):
        self.maxsize = maxsize
        self.items = []

    def put(self, item):
        if self.maxsize and len(self.items) >= self.maxsize:
            raise ValueError("queue is full")
        self.items.append(item)

    def get(self):
        return self.items.pop(0)
''',
    ),
    (
        "parser",
        "options",
        """
def main(argv=None):
    parser = argparse.ArgumentParser(description="Print the lines of a file.")
    parser.add_argument("filename", help="the file to read")
    parser.add_argument("-n", "--number", action="store_true")
    parser.add_argument("-r", "--reverse", action="store_true")
    args = parser.parse_args(argv)
    lines = read_lines(args.filename)
    if args.reverse:
        lines.reverse()
""",
    ),
    (
        "node",
        "element",
        '''
    def insert(self, node, before=None):
        """Insert a node in front of another one, or at the end."""
        if node.parent is not None:
            node.parent.remove(node)
        if before is None:
            self.children.append(node)
        else:
            index = self.children.index(before)
            self.children.insert(index, node)
        node.parent = self
        return node
''',
    ),
    (
        "buffer",
        "pending",
        '''
    def readline(self, size=-1):
        """Read a line, including the newline character."""
        buffer = []
        total = 0
        while size < 0 or total < size:
            char = self.read(1)
            if not char:
                break
            buffer.append(char)
            total += 1
            if char == "\\n":
                break
        return "".join(buffer)
''',
    ),
    (
        "result",
        "merged",
        '''
def merge(left, right, key=None):
    """Merge two sorted lists into one sorted list."""
    result = []
    i = j = 0
    while i < len(left) and j < len(right):
        if key(left[i]) <= key(right[j]):
            result.append(left[i])
            i += 1
        else:
            result.append(right[j])
            j += 1
    return result + left[i:] + right[j:]
''',
    ),
    (
        "headers",
        "fields",
        '''
def parse_headers(stream):
    """Read header lines up to the first empty one."""
    headers = {}
    for line in stream:
        line = line.rstrip("\\r\\n")
        if not line:
            break
        name, sep, value = line.partition(":")
        if not sep:
            raise ValueError("malformed header: %r" % line)
        headers[name.strip().lower()] = value.strip()
    return headers
''',
    ),
    (
        "handler",
        "callback",
        '''
    def add_handler(self, name, handler):
        """Call handler whenever the named event happens."""
        if not callable(handler):
            raise TypeError("handler must be callable")
        self._handlers.setdefault(name, []).append(handler)

    def dispatch(self, name, *args, **kwargs):
        for handler in self._handlers.get(name, ()):
            handler(*args, **kwargs)
''',
    ),
)
NUM_PROMPTS = len(_EXCERPTS)


def demo_prompts(kind: PromptKind, count: int) -> list[str]:
    """`count` prompts of one kind, all different; ValueError for more than there are."""
    if not 1 <= count <= NUM_PROMPTS:
        raise ValueError(f"batch is {count}, expected 1..{NUM_PROMPTS}: there are {NUM_PROMPTS} prompts of a kind")
    return [_prompt(kind, old, new, code.strip("\n")) for old, new, code in _EXCERPTS[:count]]


def _prompt(kind: PromptKind, old: str, new: str, code: str) -> str:
    """Without a newline at the end: the tokenizer joins it to the indentation that follows."""
    if kind is PromptKind.EDIT:
        return f"{code}\n# rename {old} to {new}"
    if kind is PromptKind.REPEAT:
        return f"{code}\n# again"
    return code
