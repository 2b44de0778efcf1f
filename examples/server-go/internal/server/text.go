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

type tokenizeResponse struct {
	Count       int      `json:"count"`
	MaxModelLen int      `json:"max_model_len"`
	Tokens      []uint32 `json:"tokens"`
	TokenStrs   []string `json:"token_strs,omitempty"`
}

func (s *Server) tokenize(w http.ResponseWriter, r *http.Request) error {
	var body tokenizeRequest
	if err := s.decode(w, r, &body); err != nil {
		return err
	}
	model, err := s.model(r.Context(), body.Model)
	if err != nil {
		return err
	}
	tokens, err := body.tokens(model)
	if err != nil {
		return err
	}
	answer := tokenizeResponse{Count: len(tokens), MaxModelLen: model.Engine.ModelInfo().MaxModelLen, Tokens: tokens}
	if tokens == nil {
		answer.Tokens = []uint32{}
	}
	for _, token := range tokens {
		if !body.ReturnTokenStrs {
			break
		}
		bytes, err := model.Engine.TokenBytes(token)
		if err != nil {
			return err
		}
		answer.TokenStrs = append(answer.TokenStrs, printable(bytes))
	}
	writeJSON(w, http.StatusOK, answer)
	return nil
}

func (t *tokenizeRequest) tokens(model *Model) ([]uint32, error) {
	if (t.Prompt != nil) == (t.Messages != nil) {
		return nil, badRequest("prompt", "the request needs either prompt or messages; send one of them")
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

func (s *Server) detokenize(w http.ResponseWriter, r *http.Request) error {
	var body struct {
		Model             string   `json:"model"`
		Tokens            []uint32 `json:"tokens"`
		SkipSpecialTokens bool     `json:"skip_special_tokens"`
	}
	if err := s.decode(w, r, &body); err != nil {
		return err
	}
	model, err := s.model(r.Context(), body.Model)
	if err != nil {
		return err
	}
	text, err := model.Engine.Detokenize(body.Tokens, body.SkipSpecialTokens)
	if err != nil {
		return err
	}
	writeJSON(w, http.StatusOK, map[string]string{"prompt": text})
	return nil
}
