"""One federation on many machines, over any transport: its members, and the messages that each side accepts from the other."""
