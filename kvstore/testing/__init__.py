"""What the tests of anything over this store need, shipped with it."""
