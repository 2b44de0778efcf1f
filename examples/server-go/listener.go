package main

import (
	"net"
	"sync"
)

// A limitedListener has at most a number of open connections. Further clients wait in the queue of
// the kernel.
type limitedListener struct {
	net.Listener
	slots  chan struct{} // one element for each connection
	closed chan struct{}
	close  func() error
}

func limitConnections(listener net.Listener, limit int) *limitedListener {
	closed := make(chan struct{})
	return &limitedListener{listener, make(chan struct{}, limit), closed,
		sync.OnceValue(func() error {
			close(closed)
			return listener.Close()
		})}
}

func (l *limitedListener) Accept() (net.Conn, error) {
	select {
	case l.slots <- struct{}{}:
	case <-l.closed:
		return nil, net.ErrClosed
	}
	connection, err := l.Listener.Accept()
	if err != nil {
		<-l.slots
		return nil, err
	}
	return &limitedConnection{connection, sync.OnceFunc(func() { <-l.slots })}, nil
}

func (l *limitedListener) Close() error { return l.close() }

type limitedConnection struct {
	net.Conn
	release func()
}

func (c *limitedConnection) Close() error {
	defer c.release()
	return c.Conn.Close()
}
