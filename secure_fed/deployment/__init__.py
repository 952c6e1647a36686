"""One federation on many machines, whatever carries its messages: who is in it, and what each side accepts of the other."""
