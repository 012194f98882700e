"""The fault matrix: where a process dies, how, in which role; what the survivors must see."""
