// Package zmtp serves sockets of ZeroMQ over TCP: PUB, and ROUTER for requests. The protocol is
// ZMTP 3.0 (https://rfc.zeromq.org/spec/23/) with the mechanism NULL, which every libzmq since 4.0
// speaks. A client can neither delay other clients nor make the server allocate much: frames from
// clients have a maximum size, queues have a limit, and each write has a deadline.
package zmtp

import (
	"bufio"
	"bytes"
	"encoding/binary"
	"errors"
	"fmt"
	"io"
	"log/slog"
	"net"
	"slices"
	"sync"
	"time"
)

const (
	handshakeTimeout = 10 * time.Second
	// Clients send subscriptions and requests only, which are short.
	maxFrameBytes = 4096
	maxFrames     = 8
)

// Flags of a frame.
const (
	flagMore    = 1
	flagLong    = 2
	flagCommand = 4
)

// Options of a socket.
type Options struct {
	// WriteTimeout is the time within which a client must take each message.
	WriteTimeout time.Duration
	// QueueBytes is the maximum number of bytes that wait for one subscriber.
	QueueBytes int64
	Log        *slog.Logger
}

// AppendMessage appends the encoding of a message.
func AppendMessage(to []byte, frames ...[]byte) []byte {
	for i, frame := range frames {
		var flags byte
		if i+1 < len(frames) {
			flags = flagMore
		}
		to = appendFrame(to, flags, frame)
	}
	return to
}

func appendFrame(to []byte, flags byte, body []byte) []byte {
	if len(body) > 255 {
		to = binary.BigEndian.AppendUint64(append(to, flags|flagLong), uint64(len(body)))
	} else {
		to = append(to, flags, byte(len(body)))
	}
	return append(to, body...)
}

func appendCommand(to []byte, name string, body []byte) []byte {
	command := append([]byte{byte(len(name))}, name...)
	return appendFrame(to, flagCommand, append(command, body...))
}

// A connection is one client after the handshake.
type connection struct {
	net.Conn
	in           *bufio.Reader
	writeTimeout time.Duration
}

// write sends encoded messages. It returns an error if the client does not take them in time.
func (c *connection) write(message []byte) error {
	c.SetWriteDeadline(time.Now().Add(c.writeTimeout))
	_, err := c.Write(message)
	return err
}

// open performs the handshake. peers are the types of sockets that may connect.
func open(raw net.Conn, socketType string, peers []string, timeout time.Duration) (
	*connection, error) {
	c := &connection{Conn: raw, in: bufio.NewReaderSize(raw, 512), writeTimeout: timeout}
	c.SetDeadline(time.Now().Add(handshakeTimeout))
	// Signature, version 3.0, mechanism, and zeros: not the server of a mechanism.
	greeting := make([]byte, 64)
	greeting[0], greeting[9], greeting[10] = 0xff, 0x7f, 3
	copy(greeting[12:32], "NULL")
	var properties []byte
	properties = appendProperty(properties, "Socket-Type", socketType)
	properties = appendProperty(properties, "Identity", "")
	if _, err := c.Write(appendCommand(slices.Clone(greeting), "READY", properties)); err != nil {
		return nil, err
	}
	var peer [64]byte
	if _, err := io.ReadFull(c.in, peer[:]); err != nil {
		return nil, err
	}
	if peer[0] != 0xff || peer[9]&1 == 0 || peer[10] < 3 ||
		!bytes.Equal(peer[12:32], greeting[12:32]) {
		return nil, errors.New("the client does not speak ZMTP 3 with the mechanism NULL")
	}
	flags, body, err := c.readFrame()
	if err != nil {
		return nil, err
	}
	name, rest := cutCommand(body)
	if flags&flagCommand == 0 || name != "READY" {
		return nil, errors.New("the client did not send READY")
	}
	peerType, err := property(rest, "Socket-Type")
	if err != nil {
		return nil, err
	}
	if !slices.Contains(peers, peerType) {
		return nil, fmt.Errorf("a %s socket cannot be connected to %s", peerType, socketType)
	}
	return c, c.SetDeadline(time.Time{})
}

func appendProperty(to []byte, name, value string) []byte {
	to = append(append(to, byte(len(name))), name...)
	return append(binary.BigEndian.AppendUint32(to, uint32(len(value))), value...)
}

// property returns a property of a READY command. Names are not case-sensitive.
func property(properties []byte, name string) (value string, err error) {
	for len(properties) > 0 {
		nameLen := int(properties[0])
		if len(properties) < 1+nameLen+4 {
			return "", errors.New("the properties of the client are cut off")
		}
		key := properties[1 : 1+nameLen]
		properties = properties[1+nameLen:]
		valueLen := binary.BigEndian.Uint32(properties)
		properties = properties[4:]
		if uint64(len(properties)) < uint64(valueLen) {
			return "", errors.New("the properties of the client are cut off")
		}
		if bytes.EqualFold(key, []byte(name)) {
			value = string(properties[:valueLen])
		}
		properties = properties[valueLen:]
	}
	return value, nil
}

// cutCommand divides a command in its name and its body. The name is empty if it is cut off.
func cutCommand(frame []byte) (name string, body []byte) {
	if len(frame) == 0 || len(frame) < 1+int(frame[0]) {
		return "", nil
	}
	end := 1 + int(frame[0])
	return string(frame[1:end]), frame[end:]
}

func (c *connection) readFrame() (flags byte, body []byte, err error) {
	if flags, err = c.in.ReadByte(); err != nil {
		return 0, nil, err
	}
	var size [8]byte
	length := size[7:]
	if flags&flagLong != 0 {
		length = size[:]
	}
	if _, err = io.ReadFull(c.in, length); err != nil {
		return 0, nil, err
	}
	count := binary.BigEndian.Uint64(size[:])
	if count > maxFrameBytes {
		return 0, nil, fmt.Errorf("a frame is too large (%d bytes, maximum %d)", count,
			maxFrameBytes)
	}
	body = make([]byte, count)
	_, err = io.ReadFull(c.in, body)
	return flags, body, err
}

// read returns the frames of the next message, or the one frame of a command.
func (c *connection) read() (frames [][]byte, command bool, err error) {
	for {
		flags, body, err := c.readFrame()
		if err != nil {
			return nil, false, err
		}
		frames = append(frames, body)
		switch {
		case flags&flagCommand != 0:
			if len(frames) > 1 || flags&flagMore != 0 {
				return nil, false, errors.New("a command is inside of a message")
			}
			return frames, true, nil
		case flags&flagMore == 0:
			return frames, false, nil
		case len(frames) == maxFrames:
			return nil, false, fmt.Errorf("a message has more than %d frames", maxFrames)
		}
	}
}

// pong returns the answer to a PING command. Its body is a time to live, and a context to repeat.
func pong(body []byte) []byte {
	if len(body) > 2 {
		return appendCommand(nil, "PONG", body[2:])
	}
	return appendCommand(nil, "PONG", nil)
}

// A socket accepts connections until it is closed.
type socket struct {
	listener   net.Listener
	options    Options
	socketType string
	peers      []string
	// serve reads from a client until its connection ends.
	serve func(*connection) error

	mu          sync.Mutex
	connections map[net.Conn]struct{} // nil if the socket is closed
	running     sync.WaitGroup
}

func (s *socket) start() {
	s.connections = make(map[net.Conn]struct{})
	s.running.Add(1)
	go s.accept()
}

func (s *socket) accept() {
	defer s.running.Done()
	for {
		raw, err := s.listener.Accept()
		if errors.Is(err, net.ErrClosed) {
			return
		}
		if err != nil { // such as too many open files
			s.options.Log.Warn("a client of KV events was not accepted", "error", err.Error())
			time.Sleep(100 * time.Millisecond)
			continue
		}
		s.mu.Lock()
		open := s.connections != nil
		if open {
			s.connections[raw] = struct{}{}
			s.running.Add(1)
			go s.run(raw)
		}
		s.mu.Unlock()
		if !open {
			raw.Close()
		}
	}
}

func (s *socket) run(raw net.Conn) {
	defer s.running.Done()
	c, err := open(raw, s.socketType, s.peers, s.options.WriteTimeout)
	if err == nil {
		err = s.serve(c)
	}
	raw.Close()
	s.mu.Lock()
	delete(s.connections, raw)
	closed := s.connections == nil
	s.mu.Unlock()
	if err != nil && !errors.Is(err, io.EOF) && !closed {
		s.options.Log.Warn("the connection of a client of KV events ended", "client",
			raw.RemoteAddr().String(), "error", err.Error())
	}
}

// Close closes all connections, and returns when no goroutine of the socket is left.
func (s *socket) Close() {
	s.listener.Close()
	s.mu.Lock()
	for raw := range s.connections {
		raw.Close()
	}
	s.connections = nil
	s.mu.Unlock()
	s.running.Wait()
}
