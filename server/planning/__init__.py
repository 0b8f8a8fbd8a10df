"""What size to buy: a request trace against sizes of the cache, without any bytes."""
