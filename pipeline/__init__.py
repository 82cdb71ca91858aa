"""What a picture is: the description of a stream, its listing, order, draws, transforms and backends."""
