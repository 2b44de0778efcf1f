package server

import (
	"net/http"
)

type tokenizeRequest struct {
	Model string `json:"model"`
	// Prompt is a text. Without it, the messages are rendered.
	Prompt           *string `json:"prompt"`
	AddSpecialTokens *bool   `json:"add_special_tokens"`
	ReturnTokenStrs  bool    `json:"return_token_strs"`
	chatPrompt
}

func (t *tokenizeRequest) modelName() string { return t.Model }

type tokenizeResponse struct {
	Count       int      `json:"count"`
	MaxModelLen int      `json:"max_model_len"`
	Tokens      []uint32 `json:"tokens"`
	TokenStrs   []string `json:"token_strs,omitempty"`
}

func (s *Server) tokenize(w http.ResponseWriter, r *http.Request) error {
	var body tokenizeRequest
	model, err := s.read(w, r, &body)
	if err != nil {
		return err
	}
	var tokens []uint32
	err = s.compute(r.Context(), func() (err error) {
		tokens, err = body.tokens(model)
		return err
	})
	if err != nil {
		return err
	}
	answer := tokenizeResponse{Count: len(tokens),
		MaxModelLen: model.Engine.ModelInfo().MaxModelLen, Tokens: tokens}
	if tokens == nil {
		answer.Tokens = []uint32{}
	}
	for _, token := range tokens {
		if !body.ReturnTokenStrs {
			break
		}
		text, err := model.tokenText(token)
		if err != nil {
			return err
		}
		answer.TokenStrs = append(answer.TokenStrs, text.printable)
	}
	writeJSON(w, http.StatusOK, answer)
	return nil
}

func (t *tokenizeRequest) tokens(model *Model) ([]uint32, error) {
	if (t.Prompt != nil) == (t.Messages != nil) {
		return nil, badRequest("prompt", "the request needs either prompt or messages; send one "+
			"of them")
	}
	if t.Prompt != nil {
		return model.Engine.Tokenize(*t.Prompt, t.AddSpecialTokens == nil || *t.AddSpecialTokens)
	}
	turn, err := t.turn()
	if err != nil {
		return nil, err
	}
	prompt, err := model.render(turn)
	if err != nil {
		return nil, err
	}
	return model.Engine.Tokenize(prompt.text, t.AddSpecialTokens != nil && *t.AddSpecialTokens)
}

type detokenizeRequest struct {
	Model             string   `json:"model"`
	Tokens            []uint32 `json:"tokens"`
	SkipSpecialTokens bool     `json:"skip_special_tokens"`
}

func (d *detokenizeRequest) modelName() string { return d.Model }

func (s *Server) detokenize(w http.ResponseWriter, r *http.Request) error {
	var body detokenizeRequest
	model, err := s.read(w, r, &body)
	if err != nil {
		return err
	}
	var text string
	err = s.compute(r.Context(), func() (err error) {
		text, err = model.Engine.Detokenize(body.Tokens, body.SkipSpecialTokens)
		return err
	})
	if err != nil {
		return err
	}
	writeJSON(w, http.StatusOK, map[string]string{"prompt": text})
	return nil
}
