"""A test rig that plays whole sessions in one process, with dropouts and with lies. It is not part of the protocol.

It reads and changes the private state of clients and servers, which no party of a session can do: to lie like an attacker who
knows everything, and to compare the sum with vectors that only the rig has seen. No part of the protocol imports it.

`simulate` plays a session and reports its cost and who noticed a lie. `scene` is the state of that session, and `play` takes it
from stage to stage. `tampering` has the lies, and `verdict` decides whether they were caught.
"""
