package zmtp

import "net"

// A Handler returns the messages that answer a request. With an error, the connection is closed.
type Handler func(request [][]byte) (answers [][][]byte, err error)

// A Router is a ROUTER socket that answers requests of REQ and DEALER sockets. The requests of a
// client are answered one after the other, and do not wait for those of other clients.
type Router struct{ socket }

// NewRouter starts a socket. The handler is called concurrently. Close closes the listener, too.
func NewRouter(listener net.Listener, options Options, handler Handler) *Router {
	r := new(Router)
	r.socket = socket{listener: listener, options: options, socketType: "ROUTER",
		peers: []string{"REQ", "DEALER", "ROUTER"}, serve: func(c *connection) error {
			return answer(c, handler)
		}}
	r.start()
	return r
}

func answer(c *connection, handler Handler) error {
	for {
		frames, command, err := c.read()
		if err != nil {
			return err
		}
		if command {
			if name, body := cutCommand(frames[0]); name == "PING" {
				err = c.write(pong(body))
			}
		} else {
			err = answerRequest(c, handler, frames)
		}
		if err != nil {
			return err
		}
	}
}

func answerRequest(c *connection, handler Handler, request [][]byte) error {
	answers, err := handler(request)
	if err != nil {
		return err
	}
	for _, frames := range answers {
		if err := c.write(AppendMessage(nil, frames...)); err != nil {
			return err
		}
	}
	return nil
}
