"""Ray: channels that reach every node of a cluster, and tensors in object refs that are views. Experimental.

| module | what it does |
|---|---|
| `relays` | `relays`: a relay on each node, kept up by a thread: actors on any node meet by channel name |
| `node` | what runs on a node, in an actor: its far relay, and a near relay to each other node |
| `objects` | `register`: tensors in object refs are views of Ray's object store, on the node that has the object |

Nothing else of the library imports this package, and importing it imports no Ray: its functions do.
"""

from __future__ import annotations

from .node import NodeStatistics
from .objects import register, unregister
from .relays import Relays, relays

__all__ = ["NodeStatistics", "Relays", "register", "relays", "unregister"]
