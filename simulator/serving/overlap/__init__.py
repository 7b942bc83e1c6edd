"""Methods that draft and verify at the same time: PEARL and DSI."""
