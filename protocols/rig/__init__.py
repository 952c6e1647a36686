"""A rig that plays whole sessions in one process, with clients that vanish and with lies. It is no part of the protocol.

It reads and changes the private state of clients and servers, as no party of a session can: to lie as somebody who knows
everything would, and to compare the sum with vectors that only it has seen. Nothing of the protocol imports it.

`simulate` plays a session and says what it cost and who noticed a lie. `scene` is that session, stage by stage. `tampering` has
the lies, and `verdict` says whether they were caught.
"""
