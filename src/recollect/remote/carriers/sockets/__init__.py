"""What carriers over stream sockets share."""
